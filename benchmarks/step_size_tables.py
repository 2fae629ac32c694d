"""Tables and the picture of the runs of step_size.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import vl_convert

from rl_training.records.report.charts import BLUE, GREY
from rl_training.records.report.page import VEGA_LITE

Lines = Sequence[Mapping[str, Any]]
RULES = ("fixed", "bounded", "adaptive", "linear")
COLLAPSE = 0.05  # of reward below the untrained model's


def read_lines(output: Path) -> Lines:
    """Return the lines of the runs that are there."""
    path = output / "runs.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def chosen(lines: Lines, **values: Any) -> list[Mapping[str, Any]]:
    """Return the lines that have these values; of a name with a collection, one of them."""
    return [
        line
        for line in lines
        if all(line[k] in v if isinstance(v, set | frozenset) else line[k] == v for k, v in values.items())
    ]


def by_rate(lines: Lines, measure: str) -> dict[float, float]:
    """Return the mean of a measure over seeds, by start rate."""
    rates = sorted({line["rate"] for line in lines})
    return {rate: statistics.fmean(line[measure] for line in chosen(lines, rate=rate)) for rate in rates}


def untrained(lines: Lines, setting: str) -> Mapping[str, Any]:
    return chosen(lines, setting=setting, rule="untrained")[0]


def collapsed(lines: Lines, setting: str, rule: str) -> list[Mapping[str, Any]]:
    """Return the collapsed runs of a rule in a setting."""
    least = untrained(lines, setting)["reward"] - COLLAPSE
    return [run for run in chosen(lines, setting=setting, rule=rule) if run["problem"] or run["reward"] < least]


def pairs(lines: Lines, setting: str) -> tuple[Lines, Lines]:
    """Return the runs of fixed and of bounded in a setting that both rules have, by start rate and seed."""
    runs = {
        rule: {(line["rate"], line["seed"]): line for line in chosen(lines, setting=setting, rule=rule)}
        for rule in ("fixed", "bounded")
    }
    shared = sorted(runs["fixed"].keys() & runs["bounded"].keys())
    return [runs["fixed"][key] for key in shared], [runs["bounded"][key] for key in shared]


def row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"


def print_header(*names: str) -> None:
    print("\n" + row(names) + "\n" + row(["---"] * len(names)))


def print_judgement(lines: Lines, settings: Sequence[str], measure: str) -> None:
    """Print what the bar asks for: mean and worst over start rates, and the regret to the best fixed rate."""
    print_header("setting", "runs", "untrained", "best fixed (at)", "fixed: mean", "worst", "collapsed",
                 "bounded: mean", "worst", "collapsed", "regret", "worst below best fixed")  # fmt: skip
    regrets, shortfalls, lost = [], [], 0
    for setting in settings:
        fixed, bounded = (by_rate(runs, measure) for runs in pairs(lines, setting))
        rate = max(fixed, key=fixed.__getitem__)
        best, mean, worst = fixed[rate], statistics.fmean(bounded.values()), min(bounded.values())
        down = {rule: len(collapsed(lines, setting, rule)) for rule in ("fixed", "bounded")}
        regrets.append(best - mean)
        shortfalls.append(best - worst)
        lost += down["bounded"]
        print(row([setting, 2 * len(pairs(lines, setting)[0]), float(untrained(lines, setting)[measure]),
                   f"{best:.3f} ({rate:g})", statistics.fmean(fixed.values()), min(fixed.values()), down["fixed"],
                   mean, worst, down["bounded"], best - mean, best - worst]))  # fmt: skip
    within = sum(shortfall <= 0.05 for shortfall in shortfalls)
    print(
        f"\n{measure}: worst start rate within .05 of the best fixed rate in {within} of {len(shortfalls)} settings, "
        f"mean regret {statistics.fmean(regrets):.3f}, {lost} collapsed runs of bounded"
    )


def print_rivals(lines: Lines, settings: Sequence[str]) -> None:
    """Print mean and worst over the start rates and the seed that all rules have."""
    print_header("setting", *(f"{rule}, mean / worst" for rule in RULES))
    for setting in settings:
        chosen_lines = [line for line in chosen(lines, setting=setting, seed=0) if line["rule"] in RULES]
        rules = [rule for rule in RULES if chosen(chosen_lines, rule=rule)]
        shared = frozenset.intersection(
            *(frozenset(r["rate"] for r in chosen(chosen_lines, rule=rule)) for rule in rules)
        )
        cells = []
        for rule in RULES:
            ends = by_rate(chosen(chosen_lines, rule=rule, rate=shared), "reward").values()
            cells.append(f"{statistics.fmean(ends):.3f} / {min(ends):.3f}" if ends else "–")
        print(row([setting, *cells]))


def print_ends(lines: Lines, settings: Sequence[str]) -> None:
    """Print entropy and distance from the first model at the end: at the best fixed rate, and bounded from any."""
    print_header("setting", "entropy, untrained", "best fixed", "bounded", "KL to the first model, best fixed",
                 "bounded", "pass@8, best fixed", "bounded")  # fmt: skip
    for setting in settings:
        fixed, bounded = pairs(lines, setting)
        rewards = by_rate(fixed, "reward")
        at_best = chosen(fixed, rate=max(rewards, key=rewards.__getitem__))
        cells: list[float] = [float(untrained(lines, setting)["entropy"])]
        for measure in ("entropy", "kl_to_first", "pass8"):
            cells += [statistics.fmean(run[measure] for run in runs) for runs in (at_best, bounded)]
        print(row([setting, *cells]))


def print_runs(lines: Lines, settings: Sequence[str]) -> None:
    """Print the reward and pass@8 of every start rate."""
    for setting in settings:
        chosen_lines = [line for line in chosen(lines, setting=setting) if line["rule"] in RULES]
        rates = sorted({line["rate"] for line in chosen_lines})
        print_header(f"{setting}: reward / pass@8", *(f"{rate:g}" for rate in rates))
        for rule in RULES:
            rewards, pass8 = (by_rate(chosen(chosen_lines, rule=rule), name) for name in ("reward", "pass8"))
            print(row([rule, *(f"{rewards[r]:.3f} / {pass8[r]:.3f}" if r in rewards else "–" for r in rates)]))


def print_tables(lines: Lines, settings: Sequence[str]) -> None:
    for measure in ("reward", "pass8"):
        print_judgement(lines, settings, measure)
    print_rivals(lines, settings)
    print_ends(lines, settings)
    print_runs(lines, settings)


def draw(lines: Lines, settings: Sequence[str], path: Path) -> None:
    """Draw reward at the end against the start rate, a panel for each setting, fixed and bounded."""
    points, floors = [], []
    for setting in settings:
        for rule, runs in zip(("fixed rate", "bounded step"), pairs(lines, setting), strict=True):
            ends = by_rate(runs, "reward")
            points += [{"setting": setting, "rule": rule, "rate": rate, "reward": end} for rate, end in ends.items()]
        floors.append({"setting": setting, "reward": untrained(lines, setting)["reward"]})
    axes = {
        "x": {"field": "rate", "type": "quantitative", "scale": {"type": "log"}, "title": "start rate",
              "axis": {"format": "~e", "values": sorted({point["rate"] for point in points})[::2], "grid": False}},
        "y": {"field": "reward", "type": "quantitative", "title": "held-out reward", "scale": {"zero": True}},
    }  # fmt: skip
    colors = {"domain": ["fixed rate", "bounded step"], "range": [GREY, BLUE]}
    ink = {"color": {"field": "rule", "type": "nominal", "scale": colors, "legend": {"title": None, "orient": "top"}}}
    floor = {"data": {"values": floors}, "mark": {"type": "rule", "strokeDash": [3, 3], "color": "#666666"}}
    panels = [
        {
            "title": setting, "width": 150, "height": 120,
            "layer": [
                {"data": {"values": [p for p in points if p["setting"] == setting]},
                 "mark": {"type": "line", "point": True}, "encoding": axes | ink},
                floor | {"data": {"values": [f for f in floors if f["setting"] == setting]},
                         "encoding": {"y": {"field": "reward", "type": "quantitative"}}},
            ],
        }
        for setting in settings
    ]  # fmt: skip
    spec = {"concat": panels, "columns": 4, "config": {"background": "white"}}
    path.write_bytes(vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=1.5))
    print(f"\n{path}")

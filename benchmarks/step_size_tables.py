"""Tables and picture of step_size.py's runs."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import vl_convert

from rl_training.records.pages.charts import BLUE, GREEN, GREY, ORANGE
from rl_training.records.pages.page import VEGA_LITE

Lines = Sequence[Mapping[str, Any]]
BOUNDED = {
    "bounded": "2e-3",
    "bounded_3e-3": "3e-3",
    "bounded_1e-2": "1e-2",
}  # the rules that are judged, with their target_kl_share
RIVALS = (
    "fixed", "linear", "adaptive", "clip", "clip_0.25", "schedule_free", "prodigy", "skip", "skip_0.01", *BOUNDED,
)  # fmt: skip
LONGER = ("bounded_5x", "bounded_1e-2_5x")
POWERS = {str(n): "10" + str(n).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")) for n in range(-5, 4)}
POWER_OF_TEN = f"{json.dumps(POWERS)}['' + round(log(datum.value) / LN10)]"  # Vega's label of a tick
COLLAPSE = 0.05  # a run has collapsed if its reward is this much below the untrained model's
NEAR, MEAN_REGRET = 0.05, 0.02  # the bar: for the worst start rate in 5 of 6 settings, and for the mean over settings


def read_lines(output: Path) -> Lines:
    """Return the lines of the existing runs."""
    path = output / "runs.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def select(lines: Lines, **values: Any) -> list[Mapping[str, Any]]:
    """Return the lines that have these values. A set means any of its values."""
    return [
        line
        for line in lines
        if all(line[k] in v if isinstance(v, set | frozenset) else line[k] == v for k, v in values.items())
    ]


def by_rate(lines: Lines, measure: str) -> dict[float, float]:
    """Return, for each start rate, the mean of a measure over seeds."""
    rates = sorted({line["rate"] for line in lines})
    return {rate: statistics.fmean(line[measure] for line in select(lines, rate=rate)) for rate in rates}


def untrained(lines: Lines, setting: str) -> Mapping[str, Any]:
    return select(lines, setting=setting, rule="untrained")[0]


def collapsed(lines: Lines, setting: str, rule: str) -> list[Mapping[str, Any]]:
    """Return the collapsed runs of a rule in a setting."""
    least = untrained(lines, setting)["reward"] - COLLAPSE
    return [run for run in select(lines, setting=setting, rule=rule) if run["problem"] or run["reward"] < least]


def paired_runs(lines: Lines, setting: str, rule: str) -> tuple[Lines, Lines]:
    """Return the runs of `fixed` and those of a rule in a setting, restricted to the seeds that both have.

    A seed counts once it has all start rates that another seed of the rule has.
    """
    fixed, others = (select(lines, setting=setting, rule=name) for name in ("fixed", rule))
    seeds = complete_seeds(fixed) & complete_seeds(others)
    return select(fixed, seed=seeds), select(others, seed=seeds)


def complete_seeds(lines: Lines) -> set[int]:
    """Return the seeds that have the most start rates."""
    numbers = Counter(line["seed"] for line in lines)
    return {seed for seed, number in numbers.items() if number == max(numbers.values())}


def best_fixed(lines: Lines, setting: str, rule: str, measure: str) -> tuple[float, float]:
    """Return the best fixed rate and its measure, averaged over the seeds that the rule has."""
    ends = by_rate(paired_runs(lines, setting, rule)[0], measure)
    rate = max(ends, key=ends.__getitem__)
    return rate, ends[rate]


def row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"


def print_header(*names: str) -> None:
    print("\n" + row(names) + "\n" + row(["---"] * len(names)))


def print_judgement(lines: Lines, settings: Sequence[str], rule: str, measure: str) -> None:
    """Print what the bar is judged by: mean and worst over start rates, and the regret to the best fixed rate."""
    print_header("setting", "seeds", "runs", "untrained", "best fixed (at)", "fixed: mean", "worst", "collapsed",
                 f"{rule}: mean", "worst", "collapsed", "regret", "worst below best fixed")  # fmt: skip
    for setting in settings:
        runs = paired_runs(lines, setting, rule)
        fixed, ends = (by_rate(part, measure) for part in runs)
        rate, best = best_fixed(lines, setting, rule, measure)
        mean, worst = statistics.fmean(ends.values()), min(ends.values())
        seeds = len({line["seed"] for line in runs[1]})
        print(row([setting, seeds, sum(map(len, runs)),
                   float(untrained(lines, setting)[measure]), f"{best:.3f} ({rate:g})",
                   statistics.fmean(fixed.values()), min(fixed.values()), len(collapsed(lines, setting, "fixed")),
                   mean, worst, len(collapsed(lines, setting, rule)), best - mean, best - worst]))  # fmt: skip


def print_verdict(lines: Lines, settings: Sequence[str], rule: str, measure: str, which: str) -> None:
    """Print whether the bar holds: worst start rates near the best fixed rate, mean regret, and collapsed runs."""
    regrets, shortfalls = [], []
    for setting in settings:
        ends = by_rate(paired_runs(lines, setting, rule)[1], measure)
        _, best = best_fixed(lines, setting, rule, measure)
        regrets.append(round(best - statistics.fmean(ends.values()), 6))  # the bar is not missed by a bit of rounding
        shortfalls.append(round(best - min(ends.values()), 6))
    within, lost = sum(s <= NEAR for s in shortfalls), sum(len(collapsed(lines, name, rule)) for name in settings)
    holds = 6 * within >= 5 * len(settings) and statistics.fmean(regrets) <= MEAN_REGRET and not lost
    print(
        f"{rule}, {measure}, {which}: worst start rate within .05 of the best fixed rate in {within} of "
        f"{len(settings)} settings, mean regret {statistics.fmean(regrets):.3f}, {lost} collapsed runs: the bar "
        + ("holds" if holds else "is missed")
    )


def print_rivals(lines: Lines, settings: Sequence[str]) -> None:
    """Print each rule's mean and worst over the start rates that all rules have (prodigy: its d_coef), with seed 0."""
    with_rivals = [name for name in settings if select(lines, setting=name, rule={*RIVALS} - {"fixed", *BOUNDED})]
    rules = [rule for rule in RIVALS if select(lines, setting={*with_rivals}, rule=rule, seed=0)]
    print_header("setting", *(f"{rule}, mean / worst" for rule in rules))
    for setting in with_rivals:
        ends = {rule: by_rate(select(lines, setting=setting, rule=rule, seed=0), "reward") for rule in rules}
        shared = set.intersection(*(set(end) for rule, end in ends.items() if end and rule != "prodigy"))
        cells = []
        for rule, end in ends.items():
            values = [value for rate, value in end.items() if rule == "prodigy" or rate in shared]
            cells.append(f"{statistics.fmean(values):.3f} / {min(values):.3f}" if values else "–")
        print(row([setting, *cells]))


def print_equal_cost(lines: Lines, settings: Sequence[str]) -> None:
    """Print a bounded run of five times the steps next to the best of five fixed rates."""
    rules = [rule for rule in LONGER if select(lines, setting={*settings}, rule=rule)]
    print_header("setting: reward, pass@8, entropy", "best of five fixed rates", *rules)
    for setting in settings:
        if select(lines, setting=setting, rule={*rules}):
            fixed = select(lines, setting=setting, rule="fixed", seed=0)
            ends = [[max(fixed, key=lambda run: run["reward"])]]
            ends += [select(lines, setting=setting, rule=rule) for rule in rules]
            cells = ["".join(f"{e['reward']:.3f}, {e['pass8']:.3f}, {e['entropy']:.3f}" for e in end) for end in ends]
            print(row([setting, *(cell or "–" for cell in cells)]))


def print_ends(lines: Lines, settings: Sequence[str], rule: str) -> None:
    """Print final entropy, KL to the first model and pass@8: best fixed rate, and the rule averaged over rates."""
    print_header("setting", "entropy, untrained", "best fixed", rule, "KL to the first model, best fixed", rule,
                 "pass@8, best fixed", rule)  # fmt: skip
    for setting in settings:
        fixed, bounded = paired_runs(lines, setting, rule)
        at_best = select(fixed, rate=best_fixed(lines, setting, rule, "reward")[0])
        cells: list[float] = [float(untrained(lines, setting)["entropy"])]
        for measure in ("entropy", "kl_to_first", "pass8"):
            cells += [statistics.fmean(run[measure] for run in runs) for runs in (at_best, bounded)]
        print(row([setting, *cells]))


def print_runs(lines: Lines, settings: Sequence[str]) -> None:
    """Print reward and pass@8 of every rule from every start rate, averaged over seeds."""
    for setting in settings:
        rules = list(dict.fromkeys(line["rule"] for line in select(lines, setting=setting)))
        rates = sorted({line["rate"] for line in select(lines, setting=setting)})
        print_header(f"{setting}: reward / pass@8", *(f"{rate:g}" for rate in rates))
        for rule in rules:
            runs = select(lines, setting=setting, rule=rule)
            rewards, pass8 = (by_rate(runs, name) for name in ("reward", "pass8"))
            print(row([rule, *(f"{rewards[r]:.3f} / {pass8[r]:.3f}" if r in rewards else "–" for r in rates)]))


def print_tables(lines: Lines, groups: Mapping[str, Sequence[str]]) -> None:
    """Print all tables. A verdict is given over each group of settings, by its name; the last group has all of them."""
    everything = [*groups.values()][-1]
    for rule in BOUNDED:
        settings = [name for name in everything if all(paired_runs(lines, name, rule))]
        if not settings:
            continue
        parts = {which: [name for name in group if name in settings] for which, group in groups.items()}
        for measure in ("reward", "pass8"):
            print_judgement(lines, settings, rule, measure)
            print()
            for which, names in parts.items():
                if names:
                    print_verdict(lines, names, rule, measure, which)
        print_ends(lines, settings, rule)
    print_rivals(lines, everything)
    print_equal_cost(lines, everything)
    print_runs(lines, list(dict.fromkeys(line["setting"] for line in lines)))


def draw(lines: Lines, titles: Mapping[str, str], path: Path) -> None:
    """Plot the final reward against the start rate, fixed and bounded, one panel per setting, with its title.

    A line joins the means over whole seeds; bars reach from the lowest seed to the highest.
    """
    rules = {line["rule"] for line in lines}
    names = {"fixed": "fixed rate"}
    names |= {rule: f"target_kl_share={share}" for rule, share in BOUNDED.items() if rule in rules}
    colors = {"domain": list(names.values()), "range": [GREY, BLUE, ORANGE, GREEN][: len(names)]}
    legend = {"title": None, "orient": "top", "symbolType": "circle", "symbolOpacity": 1.0}
    ink = {"color": {"field": "rule", "type": "nominal", "scale": colors, "legend": legend}}
    panels = []
    for setting, title in titles.items():
        points = []
        for rule, name in names.items():
            runs = select(lines, setting=setting, rule=rule)
            runs = select(runs, seed=complete_seeds(runs))
            for rate in sorted({run["rate"] for run in runs}):
                ends = [run["reward"] for run in select(runs, rate=rate)]
                points.append({"rule": name, "rate": rate, "reward": statistics.fmean(ends),
                               "lowest": min(ends), "highest": max(ends)})  # fmt: skip
        rates = [point["rate"] for point in points]
        axes = {
            "x": {"field": "rate", "type": "quantitative", "title": "start rate",
                  "scale": {"type": "log", "domain": [min(rates) / 1.6, max(rates) * 1.6]},
                  "axis": {"labelExpr": POWER_OF_TEN, "values": [10.0**n for n in range(-5, 4)], "grid": False}},
            "y": {"field": "reward", "type": "quantitative", "title": "held-out reward", "axis": {"tickCount": 4},
                  "scale": {"domain": [0.0, 1.12 * max(point["highest"] for point in points)], "nice": False}},
        }  # fmt: skip
        ranges = axes | {"y": axes["y"] | {"field": "lowest"}, "y2": {"field": "highest"}}
        floor = {"values": [{"reward": untrained(lines, setting)["reward"]}]}
        panels.append({
            "title": {"text": title, "fontSize": 13}, "width": 230, "height": 140, "data": {"values": points},
            "layer": [
                {"data": floor, "mark": {"type": "rule", "strokeDash": [3, 3], "color": "#666666"},
                 "encoding": {"y": axes["y"]}},
                {"mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.5}, "encoding": ranges | ink},
                {"mark": {"type": "line", "point": True}, "encoding": axes | ink},
            ],
        })  # fmt: skip
    spec = {"concat": panels, "columns": 4, "config": {"background": "white"}}
    path.write_bytes(vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=1.5))
    print(f"\n{path}")

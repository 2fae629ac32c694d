"""The tables of real.py: what a run's records say of its steps, beside the truth of real_truth.py."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vl_convert
from real_truth import (
    PROMPTS,
    Sample,
    change_between,
    change_of_step,
    entropy_under,
    ess_of,
    jackknife,
    kl_of,
    measured_steps,
    reward_under,
)  # fmt: skip
from scipy.stats import t as student
from torch import Tensor

from rl_training.records.pages.charts import BLUE, GREY
from rl_training.records.pages.page import VEGA_LITE

FILE = "truth.pt"  # in a run's folder: its Samples by state
AUTOCAST_FILE = "truth_autocast.pt"  # the same, drawn and scored under bf16 autocast
SEEDS = ("lora_0_half", "lora_1", "lora_2")  # of one setting
PREDICTIONS = ("delta_h/forward", "delta_h/backward", "delta_h/trapezoid", "measured/delta_h", "delta_h/reuse")
Said = dict[str, dict[int, dict[str, Any]]]  # a run's estimates, by name and by the step that they speak of


def said_by(run: Path) -> Said:
    said: Said = {}
    if not (run / "logs" / "probes.jsonl").is_file():
        return said  # of a run without probes
    for line in (run / "logs" / "probes.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        said.setdefault(row["name"], {})[row["about_step"]] = row
    return said


def held(said: dict[str, Any], change: float, stderr: float) -> bool | None:
    """Return whether the 95 % interval of what was said, widened by the truth's, holds it; None without an interval."""
    if said.get("value") is None or said.get("stderr") is None or not math.isfinite(said["value"] + said["stderr"]):
        return None
    half = float(student.ppf(0.975, said["num_samples"] - 1)) * said["stderr"]
    return abs(said["value"] - change) <= math.hypot(half, 1.96 * stderr)


def steps_table(run: Path, samples: dict[int, Sample], said: Said) -> None:
    """Print the truth of each step beside what was said of it."""
    print(f"\n{run.name}, ± 95 %")
    print_head("step", "truth", *PREDICTIONS, "KL", "measured/kl", "ESS")
    for step in measured_steps(samples):
        change, stderr = jackknife(lambda kept, step=step: change_of_step(samples, step, kept))
        cells = [str(step), f"{change:+.4f} ± {1.96 * stderr:.4f}"]
        for name in PREDICTIONS:
            row = said.get(name, {}).get(step, {})
            value, error = row.get("value"), row.get("stderr")
            fits = held(row, change, stderr)
            text = "–" if value is None or not math.isfinite(value) else f"{value:+.4f}"
            if fits is not None:
                text += f" ± {float(student.ppf(0.975, row['num_samples'] - 1)) * error:.4f}{'' if fits else ' (out)'}"
            cells.append(text)
        drawn = step if step in samples else step - 1
        other = str(2 * step - 1 - drawn)
        kl = said.get("measured/kl", {}).get(step, {}).get("value")
        cells += [f"{kl_of(samples[drawn], str(drawn), other):.5f}", f"{kl:.5f}" if kl else "–",
                  f"{ess_of(samples[drawn], str(drawn), other):.2f}"]  # fmt: skip
        print(f"| {' | '.join(cells)} |")


def coverage_rows(run: Path, samples: dict[int, Sample], said: Said) -> None:
    """Print, for each prediction, how many intervals held, and its sum beside that of the truth of the same steps."""
    steps = measured_steps(samples)
    truths = {step: jackknife(lambda kept, step=step: change_of_step(samples, step, kept)) for step in steps}
    for name in PREDICTIONS:
        rows = {
            step: row
            for step in steps
            if math.isfinite((row := said.get(name, {}).get(step, {})).get("value") or math.nan)
        }
        if not rows:
            continue
        answers = [held(row, *truths[step]) for step, row in rows.items()]
        asked = [answer for answer in answers if answer is not None]
        total = sum(row["value"] for row in rows.values())
        bar = f" ± {1.96 * math.hypot(*(row['stderr'] for row in rows.values())):.3f}" if asked else ""
        truth, stderr = jackknife(lambda kept, rows=rows: sum(change_of_step(samples, step, kept) for step in rows))
        rms = math.sqrt(sum((row["value"] - truths[step][0]) ** 2 for step, row in rows.items()) / len(rows))
        cells = [run.name, f"`{name}`", f"{sum(asked)} of {len(asked)}" if asked else "–",
                 f"{total:+.3f}{bar}", f"{truth:+.3f} ± {1.96 * stderr:.3f}", f"{rms:.4f}"]  # fmt: skip
        print(f"| {' | '.join(cells)} |")


def run_row(run: Path, samples: dict[int, Sample]) -> str:
    """Return what a run came to on held-out prompts, and what it took."""
    metrics = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in metrics if "reward" in row]
    written = run / "facts.jsonl"  # not there after a signal
    facts = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()] if written.is_file() else []
    first, last = min(samples), max(samples)
    ends = []
    for state in (first, last):
        sample = samples[state]
        everyone = torch.ones(PROMPTS, dtype=torch.bool)
        ends.append((state, float(sample.rewards.mean()), entropy_under(sample, str(state), str(state), everyone)))
    cells = [run.name, str(len(rows)), f"{rows[0]['reward']:.2f} → {rows[-1]['reward']:.2f}"]
    cells += [" → ".join(f"{value:.2f} ({state})" for state, value, _ in ends)]
    cells += [" → ".join(f"{value:.2f}" for *_, value in ends), f"{sum(f['seconds'] for f in facts) / 60:.0f} min",
              f"{max((f['peak_gb'] for f in facts), default=math.nan):.1f} GB"]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def cost_rows(run: Path) -> None:
    """Print the median share of a step that each probe took, of all steps but the first."""
    metrics = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    names = sorted({name for row in metrics for name in row if name.startswith("probe_cost/")})
    for name in names:
        values = [row[name] for row in metrics[1:] if name in row]
        if values:
            print(f"| {run.name} | `{name}` | {statistics.median(values):.3f} |")


def effect(of: Callable[..., float], sample: Sample, state: str, name: str, kept: Tensor) -> float:
    """Return what the step with an intervention leads to less what the plain step does, from what a state drew.

    Args:
        of: entropy_under or reward_under.
    """
    return of(sample, state, name, kept) - of(sample, state, "plain", kept)


def print_head(*titles: str) -> None:
    print(f"\n| {' | '.join(titles)} |\n|{'---|' * len(titles)}")


def effects_table(run: Path, samples: dict[int, Sample]) -> None:
    """Print what each intervention was predicted to change at a step, and what it changed on fresh responses."""
    for folder in sorted(run.glob("from_*")):
        state = int(folder.name.removeprefix("from_"))
        if state not in samples or "plain" not in samples[state].scores:
            continue  # not measured yet
        said, sample = said_by(folder / "plain"), samples[state]
        print(f"\n{run.name}, step {state + 1}, ± 95 %")
        print_head("intervention", "quantity", "predicted", "measured", "")
        for name in sorted(set(sample.scores) - {"plain"} - set(map(str, range(99)))):
            for quantity, of in {"delta_h": entropy_under, "delta_reward": reward_under}.items():
                change, stderr = jackknife(partial(effect, of, sample, str(state), name))
                row = said[f"intervention/{name}/{quantity}"][state + 1]
                half = float(student.ppf(0.975, row["num_samples"] - 1)) * row["stderr"]
                print(f"| {name} | {quantity} | {row['value']:+.4f} ± {half:.4f} | {change:+.4f} ± {1.96 * stderr:.4f} "
                      f"| {'held' if held(row, change, stderr) else 'out'} |")  # fmt: skip


States = list[dict[str, Any]]  # reward and entropy of a run's states, with their standard errors over prompts


def states_of(run: Path, samples: dict[int, Sample]) -> States:
    """Return reward and entropy of each state of which responses have been drawn."""
    rows = []
    for state, sample in sorted(samples.items()):
        name = str(state)
        reward, reward_error = jackknife(partial(reward_under, sample, name, name))
        entropy, entropy_error = jackknife(partial(entropy_under, sample, name, name))
        rows.append({"run": run.name, "step": state, "reward": reward, "reward_error": reward_error,
                     "entropy": entropy, "entropy_error": entropy_error})  # fmt: skip
    return rows


def over_seeds(rows: States) -> States:
    """Return mean, lowest and highest of SEEDS at the states that all of them have."""
    found: States = []
    for step in sorted({row["step"] for row in rows}):
        of_seeds = [row for row in rows if row["step"] == step and row["run"] in SEEDS]
        if len(of_seeds) == len(SEEDS):
            for measure in ("reward", "entropy"):
                values = [row[measure] for row in of_seeds]
                half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
                found.append({"step": step, "measure": measure, "mean": statistics.fmean(values), "half": half,
                              "low": min(values), "high": max(values)})  # fmt: skip
    return found


def print_states(rows: States) -> None:
    """Print reward and entropy of the states, with bars over prompts, and their means over the seeds."""
    print_head("run", "step", "reward", "entropy")
    for row in rows:
        print(f"| {row['run']} | {row['step']} | {row['reward']:.3f} ± {1.96 * row['reward_error']:.3f} "
              f"| {row['entropy']:.3f} ± {1.96 * row['entropy_error']:.3f} |")  # fmt: skip
    print_head("three seeds", "step", "mean ± 95 % over seeds", "lowest to highest")
    for row in over_seeds(rows):
        print(f"| {row['measure']} | {row['step']} | {row['mean']:.3f} ± {row['half']:.3f} "
              f"| {row['low']:.3f} to {row['high']:.3f} |")  # fmt: skip


def sums_table(run: Path, samples: dict[int, Sample], said: Said) -> None:
    """Print what predictions of all steps between two states add up to, beside the change on fresh responses.

    Each state has responses of its own to the same prompts, so a jackknife leaves out a prompt at both.
    """
    for first, last in itertools.combinations(sorted(samples), 2):
        steps = range(first + 1, last + 1)
        rows = {name: [said.get(name, {}).get(step, {}) for step in steps] for name in PREDICTIONS}
        whole = {name: row for name, row in rows.items() if all(math.isfinite(r.get("value") or math.nan) for r in row)}
        if not whole:
            continue
        change, stderr = jackknife(lambda kept, ends=(first, last): change_between(samples, *ends, kept))
        cells = [run.name, f"{first} → {last}", f"{change:+.3f} ± {1.96 * stderr:.3f}"]
        for name in PREDICTIONS:
            total = sum(row["value"] for row in whole.get(name, []))
            errors = [row["stderr"] for row in whole.get(name, []) if row.get("stderr") is not None]
            bar = f" ± {1.96 * math.hypot(*errors):.3f}" if errors else ""
            cells.append(f"{total:+.3f}{bar}" if name in whole else "–")
        print(f"| {' | '.join(cells)} |")


def print_tables(runs: Sequence[Path]) -> None:
    """Print what was said of the steps of these runs beside their truth, and what it cost."""
    samples = {run: torch.load(run / FILE, weights_only=False) for run in runs}
    print_head("run", "steps", "reward of the batch", "held-out reward (at step)", "entropy there", "time", "peak")
    for run in runs:
        print(run_row(run, samples[run]))
    print_states([row for run in runs for row in states_of(run, samples[run])])
    print_head("run", "estimate", "held", "Σ", "Σ truth", "rms error")
    for run in runs:
        coverage_rows(run, samples[run], said_by(run))
    print_head("run", "states", "truth", *PREDICTIONS)
    for run in runs:
        sums_table(run, samples[run], said_by(run))
    print_head("run", "cost", "median")
    for run in runs:
        cost_rows(run)
    for run in runs:
        if measured_steps(samples[run]):
            steps_table(run, samples[run], said_by(run))
        effects_table(run, samples[run])
    for run in runs:
        if (run / AUTOCAST_FILE).is_file():
            rounded = torch.load(run / AUTOCAST_FILE, weights_only=False)
            print("\nThe next two tables hold against responses that are drawn and scored under bf16 autocast.")
            print_head("run", "estimate", "held", "Σ", "Σ truth", "rms error")
            coverage_rows(run, rounded, said_by(run))
            steps_table(run, rounded, said_by(run))


def draw_states(runs: Sequence[Path], path: Path) -> None:
    """Draw held-out reward and entropy over steps: SEEDS as a band from lowest to highest, the others with bars."""
    names = {
        "fixed_1e-3": "LoRA, 1e-3",
        "bounded_1e-3": "LoRA, 1e-3, bounded",
        "all_weights": "all weights, 5e-6",
        "random_reward": "LoRA, 1e-4, random reward",
    }
    rows = [row for run in runs for row in states_of(run, torch.load(run / FILE, weights_only=False))]
    seeds = "LoRA, 1e-4, 3 seeds"
    colors = {"domain": [seeds, *names.values()], "range": [BLUE, "#b03060", "#2e8b57", "#e1812c", GREY]}
    legend = {"title": None, "orient": "top", "symbolOpacity": 1}
    ink = {"field": "run", "type": "nominal", "scale": colors, "legend": legend}
    step = {"field": "step", "type": "quantitative", "title": "step", "axis": {"tickMinStep": 4, "grid": False}}
    panels = []
    for measure, unit in {"reward": "held-out reward", "entropy": "entropy, nats per token"}.items():
        axis = {"type": "quantitative", "title": unit, "scale": {"zero": False}}
        band = [row | {"run": seeds} for row in over_seeds(rows) if row["measure"] == measure]
        bars = [
            {"run": names[row["run"]], "step": row["step"], "mean": row[measure],
             "low": row[measure] - 1.96 * row[f"{measure}_error"],
             "high": row[measure] + 1.96 * row[f"{measure}_error"]}
            for row in rows if row["run"] in names
        ]  # fmt: skip
        ends = {"x": step, "y": axis | {"field": "low"}, "y2": {"field": "high"}, "color": ink}
        middle = {"x": step, "y": axis | {"field": "mean"}, "color": ink}
        panels.append({"width": 260, "height": 180, "layer": [
            {"data": {"values": band}, "mark": {"type": "area", "opacity": 0.2}, "encoding": ends},
            {"data": {"values": bars}, "mark": {"type": "rule"}, "encoding": ends},
            {"data": {"values": band + bars}, "mark": {"type": "line", "point": True}, "encoding": middle},
        ]})  # fmt: skip
    spec = {"hconcat": panels, "config": {"background": "white"}}
    path.write_bytes(vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=1.5))
    print(f"\n{path}")

"""The tables of real.py: what a run's records say of its steps, beside the truth of real_truth.py."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from real_truth import PROMPTS, Sample, change_of_step, entropy_under, ess_of, jackknife, kl_of, measured_steps
from scipy.stats import t as student
from torch import Tensor

PREDICTIONS = ("delta_h/forward", "delta_h/backward", "delta_h/trapezoid", "measured/delta_h", "delta_h/reuse")
Said = dict[str, dict[int, dict[str, Any]]]  # a run's estimates, by name and by the step that they speak of


def said_by(run: Path) -> Said:
    said: Said = {}
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
    facts = [json.loads(line) for line in (run / "facts.jsonl").read_text(encoding="utf-8").splitlines()]
    first, last = min(samples), max(samples)
    ends = []
    for state in (first, last):
        sample = samples[state]
        everyone = torch.ones(PROMPTS, dtype=torch.bool)
        ends.append((state, float(sample.rewards.mean()), entropy_under(sample, str(state), str(state), everyone)))
    cells = [run.name, str(len(rows)), f"{rows[0]['reward']:.2f} → {rows[-1]['reward']:.2f}"]
    cells += [" → ".join(f"{value:.2f} ({state})" for state, value, _ in ends)]
    cells += [" → ".join(f"{value:.2f}" for *_, value in ends), f"{sum(f['seconds'] for f in facts) / 60:.0f} min",
              f"{max(f['peak_gb'] for f in facts):.1f} GB"]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def cost_rows(run: Path) -> None:
    """Print the median share of a step that each probe took, of all steps but the first."""
    metrics = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    names = sorted({name for row in metrics for name in row if name.startswith("probe_cost/")})
    for name in names:
        values = [row[name] for row in metrics[1:] if name in row]
        if values:
            print(f"| {run.name} | `{name}` | {statistics.median(values):.3f} |")


def effect(sample: Sample, state: str, name: str, kept: Tensor) -> float:
    """Return the entropy after the step with an intervention less that after the plain step, from what a state drew."""
    return entropy_under(sample, state, name, kept) - entropy_under(sample, state, "plain", kept)


def print_head(*titles: str) -> None:
    print(f"\n| {' | '.join(titles)} |\n|{'---|' * len(titles)}")


def effects_table(run: Path, samples: dict[int, Sample]) -> None:
    """Print what each intervention was predicted to change at a step, and what it changed on fresh responses."""
    for folder in sorted(run.glob("from_*")):
        state = int(folder.name.removeprefix("from_"))
        said, sample = said_by(folder / "plain"), samples[state]
        print(f"\n{run.name}, step {state + 1}, ± 95 %")
        print_head("intervention", "predicted", "measured", "")
        for name in sorted(set(sample.scores) - {"plain"} - set(map(str, range(99)))):
            change, stderr = jackknife(partial(effect, sample, str(state), name))
            row = said[f"intervention/{name}/delta_h"][state + 1]
            half = float(student.ppf(0.975, row["num_samples"] - 1)) * row["stderr"]
            print(f"| {name} | {row['value']:+.4f} ± {half:.4f} | {change:+.4f} ± {1.96 * stderr:.4f} "
                  f"| {'held' if held(row, change, stderr) else 'out'} |")  # fmt: skip


def print_tables(runs: Sequence[Path]) -> None:
    """Print what was said of the steps of these runs beside their truth, and what it cost."""
    samples = {run: torch.load(run / "truth.pt", weights_only=False) for run in runs}
    print_head("run", "steps", "reward of the batch", "held-out reward (at step)", "entropy there", "time", "peak")
    for run in runs:
        print(run_row(run, samples[run]))
    print_head("run", "estimate", "held", "Σ", "Σ truth", "rms error")
    for run in runs:
        coverage_rows(run, samples[run], said_by(run))
    print_head("run", "cost", "median")
    for run in runs:
        cost_rows(run)
    for run in runs:
        steps_table(run, samples[run], said_by(run))
        effects_table(run, samples[run])

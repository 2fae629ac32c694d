"""Records → series: pure functions, which neither draw nor write."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rl_training.mathematics.estimate import Estimate
from rl_training.records.checkpoints import checkpoints_of
from rl_training.records.evaluated import IN_TRAINING, read_tables
from rl_training.records.folder import CONFIG_FILE
from rl_training.records.jsonl import ESTIMATE_FIELDS, PROBES_FILE, logs_of, read_estimates, read_metrics

NO_PROBE = f"no probe measured it ({PROBES_FILE} has no such line)"
BEGAN_ELSEWHERE = "the other sums began in the run that this one continues, whose steps are not recorded here"
NO_LATER_BATCH = "one measured step: there is no later batch to compare it with"
LAST_STEPS = 10  # over which the present rate is taken

Measurements = Mapping[int, Estimate]  # by the step at which it was measured, in order
Key = TypeVar("Key")


@dataclass(frozen=True)
class Run:
    """The records of a run, read once."""

    folder: Path
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl
    estimates: dict[str, dict[int, Estimate]]  # metric name → step → estimate
    config: str | None  # config.yaml as it stands; None when there is none
    evaluations: dict[str, dict[str, dict[int, Estimate]]]  # name of the evaluation → metric → step → estimate

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What config.yaml holds; nothing where it holds nothing, or cannot be read."""
        try:
            config = yaml.safe_load(self.config or "")
        except yaml.YAMLError:
            return {}
        return config if isinstance(config, dict) else {}

    def probe(self, name: str) -> dict[str, Any]:
        return (self.settings.get("probes") or {}).get(name) or {}

    @property
    def checkpoint_evaluations(self) -> dict[str, dict[str, dict[int, Estimate]]]:
        """The evaluations but the trainer's own."""
        return {name: metrics for name, metrics in self.evaluations.items() if name != IN_TRAINING}

    def measured(self, name: str) -> Measurements:
        """Returns this metric's estimates by step; empty when no probe measured it."""
        return self.estimates.get(name, {})

    def known(self, name: str) -> dict[int, Estimate]:
        """Returns those of this metric's estimates that are finite."""
        return finite(self.measured(name))

    def measured_steps(self, name: str) -> int:
        """Returns how many measured steps are behind the last of this metric's running means."""
        known = list(self.known(name).values())
        return int(known[-1].detail.get("measured_steps", len(known))) if known else 0

    def values(self, name: str) -> dict[int, float]:
        """Returns the finite values of this metric."""
        return {step: estimate.value for step, estimate in self.known(name).items()}

    def with_interval(self, name: str) -> Measurements:
        """Returns this metric's estimates with the intervals that are recorded beside them, NAME_low and NAME_high."""
        ends = [self.measured(f"{name}_{end}") for end in ("low", "high")]
        return {
            step: replace(e, interval=(ends[0][step].value, ends[1][step].value))
            if all(step in end and not math.isnan(end[step].value) for end in ends)
            else e
            for step, e in self.measured(name).items()
        }

    def logged(self, name: str) -> dict[int, float]:
        """Returns this metric of metrics.jsonl by step, where it is a finite number."""
        by_step = {int(line["step"]): number(line.get(name)) for line in self.metrics}
        return {step: value for step, value in by_step.items() if math.isfinite(value)}

    @property
    def last_step(self) -> int:
        """The last one that is known of: logged, measured, or saved in a checkpoint."""
        measured = (max(by_step, default=0) for by_step in self.estimates.values())
        saved = (int(path.name.rpartition("-")[2]) for path in checkpoints_of(self.folder))
        return max([int(self.metrics[-1]["step"]), *measured, *saved])

    def until(self, step: int) -> Run:
        """Returns its records up to this step."""

        def cut(quantities: Mapping[str, Measurements]) -> dict[str, dict[int, Estimate]]:
            return {name: {s: e for s, e in series.items() if s <= step} for name, series in quantities.items()}

        metrics = [line for line in self.metrics if int(line["step"]) <= step]
        evaluations = {name: cut(metrics) for name, metrics in self.evaluations.items()}
        return replace(self, metrics=metrics, estimates=cut(self.estimates), evaluations=evaluations)

    def token_entropy(self) -> dict[int, float]:
        """Returns token entropy by step, nats: as a probe measured it, else as the trainer logged it."""
        return self.values("entropy/token") or self.logged("entropy")


@dataclass(frozen=True)
class Curve:
    """What can be drawn of a quantity: its finite values, with the ends of 95 % intervals (nan: no error bar)."""

    steps: list[int]
    values: list[float]
    lows: list[float]
    highs: list[float]


def finite(measurements: Mapping[Key, Estimate]) -> dict[Key, Estimate]:
    """Returns the estimates whose value is finite."""
    return {key: estimate for key, estimate in measurements.items() if math.isfinite(estimate.value)}


def number(value: Any) -> float:
    """Returns the value as a float; nan for what is no number. Records hold an infinite one as a string."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def read_run(folder: Path) -> Run:
    """Returns the records of the run in `folder`.

    Raises FileNotFoundError when there are none, and ValueError when they cannot be read, naming the file.
    """
    logs = logs_of(folder)
    estimates: dict[str, dict[int, Estimate]] = {}
    for row in read_estimates(logs):
        estimates.setdefault(row["name"], {})[row["step"]] = _to_estimate(row)
    evaluations: dict[str, dict[str, dict[int, Estimate]]] = {}
    for name, table in read_tables(folder).items():
        for metric in table:
            evaluations.setdefault(name, {}).setdefault(metric.metric, {})[metric.step] = metric.estimate()
    return Run(folder, read_metrics(logs), estimates, read_config(folder), evaluations)


def read_config(folder: Path) -> str | None:
    """Returns the text of a run's config.yaml; None when there is none."""
    config = folder / CONFIG_FILE
    return config.read_text(encoding="utf-8", errors="replace") if config.is_file() else None


def held_out_rewards(run: Run) -> dict[str, Measurements]:
    """Returns the mean reward on prompts that training never sees, by step, for each way in which it was measured."""
    found = {f"evaluation {name}": finite(metrics.get("reward", {})) for name, metrics in run.evaluations.items()}
    return {label: rewards for label, rewards in found.items() if rewards}


def _to_estimate(row: Mapping[str, Any]) -> Estimate:
    value, reason = number(row["value"]), str(row["reason"] or "")
    if math.isnan(value):
        reason = reason or "no reason was recorded"
    interval = (number(row["low"]), number(row["high"])) if "low" in row else None
    detail = {key: fact for key, fact in row.items() if key not in ESTIMATE_FIELDS}
    stderr, num_samples = number(row["stderr"]), row["num_samples"]
    return Estimate(value, stderr, num_samples, reason, row["about_step"], detail, interval)


def changes_by_step(run: Run) -> dict[int, Estimate]:
    """Returns the known changes of entropy by one step: predicted before it, `delta_h/forward`.

    Where there is no prediction, as of an optimizer without a formula: measured after it, `measured/delta_h`, over the
    number of steps that were measured together.
    """
    forward = run.known("delta_h/forward")
    if forward:
        return forward
    steps = run.values("measured/steps")
    return {
        step: replace(e, value=e.value / steps[step], stderr=e.stderr / steps[step])
        for step, e in run.known("measured/delta_h").items()
    }


def present_rate(run: Run) -> Estimate | None:
    """Returns entropy's change per step now, the mean of the last known ones; None without one that has an error.

    `detail` has the number of steps.
    """
    changes = [e for e in changes_by_step(run).values() if math.isfinite(e.stderr)][-LAST_STEPS:]
    if not changes:
        return None
    stderr = math.sqrt(sum(e.stderr**2 for e in changes)) / len(changes)
    mean, num_samples = statistics.fmean(e.value for e in changes), min(e.num_samples for e in changes)
    return Estimate(mean, stderr, num_samples, detail={"steps": len(changes)})


def naive_of(run: Run) -> dict[int, Estimate]:
    """Returns the naive product's sum at each measured step s, to be held against the cumulative estimates there,

        naive(s) = Σ_{j<s} reuse(j),    naive(first) = 0:

    the change from the first batch to batch s is that of the updates before s. It is 0 wherever their sums are, and nan
    where they began in another run, and after a step that was not measured. Its error is a bias: it has no error bar.
    """
    reuse = run.measured("delta_h/reuse")
    if goes_on(run):
        return dict.fromkeys(reuse, Estimate.missing(BEGAN_ELSEWHERE))
    starts = origins(run) or list(reuse)[:1]
    no_bar = "no error bar: its error is a bias"
    sums = {s: Estimate(0.0, reason=no_bar) if math.isfinite(e.value) else e for s, e in reuse.items() if s in starts}
    for before, step in pairwise(reuse):
        if step in sums or before not in sums:
            continue
        if math.isnan(sums[before].value):
            sums[step] = sums[before]
        elif before != step - 1:
            sums[step] = Estimate.missing(f"step {step - 1} was not measured, so the sum is incomplete")
        elif math.isnan(reuse[before].value):
            sums[step] = Estimate.missing(reuse[before].reason)
        else:
            sums[step] = Estimate(sums[before].value + reuse[before].value, reason=no_bar)
    return dict(sorted(sums.items()))


def origins(run: Run) -> list[int]:
    """Returns the steps at which the cumulative sums are exactly 0: the first batch, and where a probe began anew."""
    measured = run.measured("delta_h/cumulative_measured")
    return [step for step, estimate in measured.items() if estimate.value == estimate.stderr == 0]


def goes_on(run: Run) -> bool:
    """Says whether the cumulative sums began in another run, which this one has branched off from."""
    sums = run.measured("delta_h/cumulative_measured")
    return not origins(run) and bool(finite(sums))


def curve(measurements: Measurements, at_about_step: bool = False) -> Curve:
    """Returns the finite values with intervals, at the step they were measured at or at the one they speak about."""
    drawn = {
        estimate.about_step if at_about_step and estimate.about_step is not None else step: estimate
        for step, estimate in finite(measurements).items()
    }
    lows, highs = ([e.ends()[end] for e in drawn.values()] for end in (0, 1))
    return Curve(list(drawn), [e.value for e in drawn.values()], lows, highs)


def why_it_ends(measurements: Measurements) -> str:
    """Returns why a quantity is missing, and from which step on if not everywhere; empty if its last value is there."""
    if not measurements:
        return NO_PROBE
    *_, last = measurements.values()
    if math.isfinite(last.value):
        return ""
    reason = last.reason or "not a finite number"
    known = finite(measurements)
    if not known:
        return reason
    return f"from step {min(step for step in measurements if step > max(known))} on: {reason}"

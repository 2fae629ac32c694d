"""The comparison of two groups in one sentence: reward and entropy, and whether they differ detectably."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl_training.records.compare.final import Difference
from rl_training.records.report.writing import format_estimate, on_one_line
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import is_significant

QUOTED_FIGURES = ("reward", "token entropy")
ONE_SEED = " This is a single seed: another may change it by more than the noise within a run."


def describe(pairs: Sequence[Difference]) -> list[str]:
    """Return a sentence for each pair of groups."""
    return [on_one_line(_difference(pair)) for pair in pairs]


def one_group(seeds: Sequence[str]) -> str:
    """Return the sentence for a comparison with one group, which has no pair."""
    return f"One group: of the settings that affect training, only the seeds differ ({', '.join(seeds)})."


def _difference(pair: Difference) -> str:
    names = f"{pair.second.name} against {pair.first.name}"
    shown = [label for label in QUOTED_FIGURES if label in pair.figures]
    if not shown:
        return f"{names}: no step is recorded in both, and there is nothing to compare."
    changes = "; ".join(f"{label} {_change(pair.figures[label])}" for label in shown)
    return f"{names}, at step {pair.step}: {changes}.{ONE_SEED if pair.single_seed else ''}"


def _change(change: Estimate) -> str:
    size = format_estimate(change, signed=True)
    if math.isnan(change.bounds()[0]):
        return f"{size}, without an error bar: more steps or seeds would give one"
    if not is_significant(change):
        return f"does not detectably differ ({size})"
    return f"significantly {'higher' if change.value > 0 else 'lower'} ({size})"

"""The comparison of two groups in words: their entropies at equal reward, and their rewards at the same step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl_training.records.compare.equal_reward import EqualReward
from rl_training.records.compare.final import Difference
from rl_training.records.report.writing import format_estimate, on_one_line
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import is_significant

TOKEN_ENTROPY = "token entropy"
QUOTED_FIGURES = ("reward", TOKEN_ENTROPY)
ONE_SEED = " This is a single seed: another may change it by more than the noise within a run."


def describe(pairs: Sequence[Difference]) -> list[str]:
    """Return what there is to say of each pair of groups."""
    return [on_one_line(_difference(pair)) for pair in pairs]


def one_group(seeds: Sequence[str]) -> str:
    """Return the sentence for a comparison with one group, which has no pair."""
    if len(seeds) == 1:
        return f"Nothing to compare: the runs have the same settings and the same seed ({seeds[0]})."
    return f"One group: of the settings that affect training, only the seeds differ ({', '.join(seeds)})."


def _difference(pair: Difference) -> str:
    names = f"{pair.second.name} against {pair.first.name}"
    if pair.other_task:
        settings = ", ".join(pair.other_task)
        return f"{names}: different tasks ({settings}). Neither their rewards nor their entropies can be compared."
    shown = [label for label in QUOTED_FIGURES if label in pair.figures]
    if not shown:
        return f"{names}: no step is recorded in both, and there is nothing to compare."
    equal = pair.equal_reward
    if math.isnan(equal.gap.value):
        at_reward = f"their entropies cannot be compared at equal reward ({equal.gap.reason})"
    else:
        at_reward = f"at reward {equal.level:#.2g}".rstrip(".") + f", {pair.second.letter} has {_entropy(equal)}"
        shown = [label for label in shown if label != TOKEN_ENTROPY]  # at a step it compares different rewards
    changes = "; ".join(f"{label} {_change(pair.figures[label])}" for label in shown)
    at_step = f" At step {pair.step}: {changes}." if changes else ""
    return f"{names}: {at_reward}.{at_step}{ONE_SEED if pair.single_seed else ''}"


def _entropy(equal: EqualReward) -> str:
    """Describe the difference of entropies at equal reward, with both entropies."""
    first, second = equal.entropies
    said = f"{format_estimate(equal.gap, signed=True)} nats of entropy"
    levels = f"{format_estimate(second)} against {format_estimate(first)}"
    if math.isnan(equal.gap.bounds()[0]):
        return f"{said}, without an error bar ({levels})"
    return f"{said} ({levels}{'' if is_significant(equal.gap) else ': no detectable difference'})"


def _change(change: Estimate) -> str:
    size = format_estimate(change, signed=True)
    if math.isnan(change.bounds()[0]):
        return f"{size}, without an error bar: more steps or seeds would give one"
    return size if is_significant(change) else f"does not detectably differ ({size})"

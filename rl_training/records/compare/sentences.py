"""The comparison of two groups in words: their entropies at equal reward, and their rewards at the same step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl_training.records.compare.equal_reward import EqualReward
from rl_training.records.compare.final import TOKEN_ENTROPY, Difference
from rl_training.records.compare.members import ABSENT
from rl_training.records.pages.writing import format_estimate, on_one_line, size_and_side
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import is_significant

QUOTED_FIGURES = ("reward", TOKEN_ENTROPY)
ONE_SEED = " This is a single seed: another may change it by more than the noise within a run."


def describe(pairs: Sequence[Difference]) -> list[str]:
    """Return what there is to say of each pair of groups."""
    return [on_one_line(_difference(pair)) for pair in pairs]


def one_group(seeds: Sequence[str]) -> str:
    """Return the sentence for a comparison with one group, which has no pair."""
    if ABSENT in seeds:
        return "One group: the runs have the same settings that affect training. Not all of their seeds are recorded."
    if len(seeds) == 1:
        return f"Nothing to compare: the runs have the same settings and the same seed ({seeds[0]})."
    return f"One group: of the settings that affect training, only the seeds differ ({', '.join(seeds)})."


def _difference(pair: Difference) -> str:
    names = f"{pair.second.name} against {pair.first.name}"
    if pair.other_task:
        settings = ", ".join(pair.other_task)
        return f"{names}: different tasks ({settings}). Neither their rewards nor their entropies can be compared."
    labels = [label for label in QUOTED_FIGURES if label in pair.figures]
    if not labels:
        return f"{names}: no step is recorded in both, and there is nothing to compare."
    equal = pair.equal_reward
    letter = pair.second.letter
    if math.isnan(equal.gap.value):
        at_reward = f"their entropies cannot be compared at equal reward ({equal.gap.reason})"
    else:
        at_reward = f"at reward {equal.level:#.2g}".rstrip(".") + f", {_entropy(letter, equal)}"
        labels = [label for label in labels if label != TOKEN_ENTROPY]  # at a step it compares different rewards
    by_window: dict[tuple[int, int], list[str]] = {}
    for label in labels:
        change = f"{letter}'s {label} {change_in_words(pair.figures[label])}"
        by_window.setdefault(pair.windows[label], []).append(change)
    at_steps = "".join(f" {_averaged(*window)}, {'; '.join(changes)}." for window, changes in by_window.items())
    return f"{names}: {at_reward}.{at_steps}{ONE_SEED if pair.single_seed else ''}"


def _averaged(start: int, end: int) -> str:
    return f"At step {end}" if start == end else f"In the mean of steps {start}–{end}"


def _entropy(letter: str, equal: EqualReward) -> str:
    """Describe the difference of entropies at equal reward, with both entropies."""
    first, second = equal.entropies
    levels = f"{format_estimate(second)} against {format_estimate(first)}"
    has = f"{letter} has {size_and_side(equal.gap, 'nats more', 'nats less')} entropy"
    if math.isnan(equal.gap.bounds()[0]):
        return f"{has}, without an error bar ({levels})"
    return f"{has} ({levels})" if is_significant(equal.gap) else f"{letter}'s entropy is about the same ({levels} nats)"


def change_in_words(change: Estimate) -> str:
    """Say by how much one group's figure is higher or lower than another's, as "is 0.060 ± 0.020 lower"."""
    size = size_and_side(change, "higher", "lower")
    if change.value == 0 and not change.half_width() > 0:
        return "is the same"
    if math.isnan(change.bounds()[0]):
        return f"is {size}, without an error bar: more steps or seeds would give one"
    return f"is {size}" if is_significant(change) else f"does not detectably differ ({size})"

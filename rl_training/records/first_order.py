"""Does a prediction hold? The sentence on it, from the numbers of a checkpoint analysis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rl_training.records.pages.writing import normal_milli
from rl_training.records.table.missing import NO_REASON
from rl_training.statistics.estimate import Z_95

KEYS = ("deltaH1", "deltaH_true", "paired_error")  # of the numbers that it takes, each with its `…_se`
MISLEADING = 0.5  # of the prediction: a difference from which on first order fails; chosen by hand


class FirstOrderVerdict(NamedTuple):
    """Whether first order fails at a step, and the sentence on it."""

    fails: bool
    sentence: str


def first_order_verdict(
    step: int, results: Mapping[str, float], reasons: Mapping[str, str] | None = None
) -> FirstOrderVerdict:
    """Return whether a prediction fails, holds, or cannot be judged.

    First order fails if its difference from the measurement on the same sequences exceeds the difference's own error
    (95 %) and half of the prediction, or half of the prediction's standard error if that is larger: less would not
    show. If the difference is second order, it scales with the square of the step, so at η times the step its share of
    the prediction is η times as large. Hence some η = 1/2, 1/4, … brings it below half.

    Args:
        step: The step that was analyzed, counted from 1.
        results: Numbers of a checkpoint analysis by key, with `…_se`; nan if not available.
        reasons: Why numbers are not available, by key.
    """
    numbers = {f"{key}{se}": results.get(f"{key}{se}", math.nan) for key in KEYS for se in ("", "_se")}
    error = numbers["paired_error"]
    size = max(abs(numbers["deltaH1"]), numbers["deltaH1_se"])  # max keeps the first if the second is nan
    if abs(error) > Z_95 * numbers["paired_error_se"] and abs(error) >= MISLEADING * size:
        return FirstOrderVerdict(True, _describe_failure(step, numbers, size))
    return FirstOrderVerdict(False, _describe_agreement(step, numbers, reasons or {}))


def _describe_failure(step: int, numbers: Mapping[str, float], size: float) -> str:
    """Return the sentence for a step at which the prediction fails.

    Args:
        size: Of the prediction, or its standard error if that is larger.
    """
    predicted = numbers["deltaH1"]
    error = numbers["paired_error"]
    (prediction, measured, difference) = _in_milli(numbers)
    times = abs(error) / (MISLEADING * size) if size > 0 else math.inf
    if math.isinf(times):  # no step is small enough
        return (
            f"Step {step}: the first order is as good as 0, and higher orders are not: do not trust forward here. "
            f"Measured {measured} (1e-3 nats per token, 95 %)."
        )
    verb = "add to" if error * predicted <= 0 else "outweigh" if abs(error) > 1.5 * abs(predicted) else "cancel"
    halvings = math.floor(math.log2(times)) + 1
    return (
        f"Step {step}: higher orders {verb} the first: do not trust forward alone at this learning rate. "
        f"Predicted {prediction}, measured {measured}, difference {difference} (1e-3 nats per token, 95 %). "
        f"If it is second order, it would be less than half of the prediction at 1/{2**halvings} of the step."
    )


def _in_milli(numbers: Mapping[str, float]) -> list[str]:
    """Return prediction, measurement and their difference in thousandths, each with its error."""
    return [normal_milli(numbers[key], numbers[f"{key}_se"]) for key in KEYS]


def _describe_agreement(step: int, numbers: Mapping[str, float], reasons: Mapping[str, str]) -> str:
    """Return the sentence for a step at which the prediction does not fail: it holds, or that is unknown."""
    if not all(map(math.isfinite, numbers.values())):
        missing = reasons_for(reasons, [f"{key}{se}" for se in ("", "_se") for key in reversed(KEYS)])
        return f"Step {step}: whether the prediction holds is not known: {missing[0]}."
    (prediction, measured, difference) = _in_milli(numbers)
    is_within_error = abs(numbers["paired_error"]) <= Z_95 * numbers["paired_error_se"]
    size = "no larger than its error" if is_within_error else "less than half of the prediction"
    return (
        f"Step {step}: entropy changes by {measured} thousandths of a nat per token, and the prediction of "
        f"{prediction} holds: their difference, {difference}, is {size} (95 %)."
    )


def reasons_for(reasons: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Return why these numbers of an analysis are nan: the recorded reasons of those that have one, each once."""
    return [*dict.fromkeys(reasons[name] for name in names if reasons.get(name))] or [NO_REASON]

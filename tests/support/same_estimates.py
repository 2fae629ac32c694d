"""Two measurements of the same steps, held against each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rl_training.records.jsonl import read_estimates
from rl_training.step.limits import UNKNOWN_TRUNCATION

Estimates = Mapping[tuple[int, str], tuple[float, float]]  # by step and name: value and standard error


def of_records(folder: Path) -> dict[tuple[int, str], tuple[float, float]]:
    return {(row["step"], row["name"]): (row["value"], row["stderr"]) for row in read_estimates(folder)}


def unknown_to_a_loop(folder: Path) -> set[str]:
    """Return the metrics in the records of a plain loop that are of responses cut off, which it does not say."""
    return {row["name"] for row in read_estimates(folder) if row.get("code") == UNKNOWN_TRUNCATION.code}


def differences(expected: Estimates, actual: Estimates, fields: int = 2) -> dict[str, float]:
    """Return the largest difference by name, relative to the value or its error: a value near 0 is no scale.

    The addends of forward (delta_h/layer/…, kind, part) may cancel and have no error: theirs is forward's scale. What
    is nan in one is nan in the other.

    fields  1 leaves out errors
    """
    assert expected.keys() == actual.keys()
    largest: dict[str, float] = {}
    for (step, name), row in expected.items():
        if name == "step/formula_error":
            continue  # rounding alone
        is_addend = name.startswith("delta_h/") and name.count("/") == 2
        whole = expected[step, f"delta_h/forward{'_sequence' * name.endswith('_sequence')}"] if is_addend else row
        scale = max((abs(number) for number in whole if math.isfinite(number)), default=0.0)
        largest.setdefault(name, 0.0)
        for value, got in zip(row[:fields], actual[step, name], strict=False):
            assert math.isnan(value) == math.isnan(got), (step, name, value, got)
            if value != got and not math.isnan(value):
                largest[name] = max(largest[name], abs(got - value) / scale)
    return largest


def too_far(off: Mapping[str, float], limit: float = 1e-5) -> dict[str, float]:
    """Return the differences above a limit, ten times as high for noise scale, same-batch product and measured change.

    Most of |G|² cancels, and norms are fp32's. While Adam's v is young, rounding of the gradient's sum, which depends
    on the processor, is divided by a v that hardly differs from 0. A measured change is between two scorings in fp32.
    """
    rough = {name for name in off if "/reuse" in name or name.startswith(("gns/", "measured/"))}
    return {name: value for name, value in off.items() if value > (10 * limit if name in rough else limit)}

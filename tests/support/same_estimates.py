"""Compares two sets of estimates of the same steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rl_training.records.jsonl import read_estimates
from rl_training.step.reasons import UNKNOWN_TRUNCATION

Estimates = Mapping[tuple[int, str], tuple[float, float]]  # by step and name: value and standard error


def of_records(folder: Path) -> dict[tuple[int, str], tuple[float, float]]:
    return {(row["step"], row["name"]): (row["value"], row["stderr"]) for row in read_estimates(folder)}


def unknown_to_a_loop(folder: Path) -> set[str]:
    """Return the metrics in a plain loop's records that need to know which responses were cut off."""
    return {row["name"] for row in read_estimates(folder) if row.get("code") == UNKNOWN_TRUNCATION.code}


def differences(expected: Estimates, actual: Estimates, fields: int = 2) -> dict[str, float]:
    """Return by name the largest difference, relative to the larger of value and error, since a value can be near 0.

    The addends of `forward` (delta_h/layer/…, kind, part, group) may cancel, so they are scaled by
    `forward`. Asserts that both have nan in the same places.

    Args:
        fields: 1 compares only values, 2 also standard errors.
    """
    assert expected.keys() == actual.keys(), expected.keys() ^ actual.keys()
    largest: dict[str, float] = {}
    for (step, name), row in expected.items():
        if name == "step/formula_error":
            continue  # pure rounding
        is_addend = name.startswith("delta_h/") and name.count("/") >= 2
        whole = expected[step, f"delta_h/forward{'_sequence' * name.endswith('_sequence')}"] if is_addend else row
        scale = max((abs(number) for number in whole if math.isfinite(number)), default=0.0)
        largest.setdefault(name, 0.0)
        for value, got in zip(row[:fields], actual[step, name], strict=False):
            assert math.isnan(value) == math.isnan(got), (step, name, value, got)
            if value != got and not math.isnan(value):
                largest[name] = max(largest[name], abs(got - value) / scale)
    return largest


def above_limit(by_name: Mapping[str, float], limit: float = 1e-5) -> dict[str, float]:
    """Return the differences above a limit. It is ten times as high for noise scale, `reuse` and measured change.

    In the noise scale most of |G|² cancels, and norms are fp32. In the first steps Adam's v is close to 0, and rounding
    errors of the gradient, which depend on the processor, are divided by it. A measured change is a difference of two
    scorings in fp32.
    """
    rough = {name for name in by_name if "/reuse" in name or name.startswith(("gns/", "measured/"))}
    return {name: value for name, value in by_name.items() if value > (10 * limit if name in rough else limit)}

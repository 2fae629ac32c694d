"""The running sum of trapezoid estimates over steps, beside the measured change of the same quantity.

Step s moves θ_s to θ_{s+1}. Its change is ½(F_s + B_{s+1}): forward, from batch s, and backward, from batch s+1. Up to
batch s the sum is

    Σ_{j<s} ½(F_j + B_{j+1})  =  ½F_1 + Σ_{1<j<s} ½(F_j + B_j) + ½B_s,

one term per BATCH on the right. Batches are sampled afresh, so the errors of these terms are uncorrelated although
F_j and B_j share batch j, and the variances of the terms on the right add up. Σ v of batches with variances v has the
degrees of freedom of (Σ v)²/Σ v² equal ones (Satterthwaite).

The variances v of ½F_s and w of ½B_{s+1} may be averages over the same batches before, worth n and m of them. At worst
their errors, v/√n and w/√m up to a factor, add up. Then v + w is worth (v + w)²/(v/√n + w/√m)² batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rl_training.mathematics.quantities import Quantity

SUMS = ("trapezoid", "cumulative_predicted", "cumulative_measured")
HOLE_IN_SUM = "an earlier step has no trapezoid estimate, so the sum is incomplete"
HALF = "it needs this step's backward and the last one's forward, and one of them is not finite or was not asked for"


class TrapezoidTerms(NamedTuple):
    """SUMS: the change over the last closed step, and from the first batch to this one, predicted and measured."""

    trapezoid: Quantity
    predicted: Quantity
    measured: Quantity


class TrapezoidSum:
    """Sums trapezoids over consecutive steps. Once one of them is nan, the sum stays nan."""

    def __init__(self) -> None:
        self._state: dict[str, Tensor] = {}

    def add(
        self, step: int, level: Quantity, forward: Quantity, backward: Quantity, half_step_stderr: Tensor
    ) -> TrapezoidTerms:
        """Returns the sums up to this batch. At the first one no step is closed: the sums are 0, the trapezoid nan.

        After a step that does not follow the last one, the predicted sum is nan from then on.

        level             the quantity itself, measured on this batch
        forward           its predicted change over the step that this batch takes
        backward          its change over the step before, seen from this batch
        half_step_stderr  of ½(forward + backward), which share this batch's noise
        """
        zero, one, nan = (torch.full_like(forward.value, number) for number in (0.0, 1.0, torch.nan))
        why_none = backward.reason or forward.reason or HALF
        now = {
            "step": torch.tensor(step),
            "forward": forward.value,
            "forward_stderr": forward.stderr,
            "forward_batches": forward.batches,
        }
        last = self._state
        if not last:
            self._state = now | {
                "first_level": level.value,
                "first_level_stderr": level.stderr,
                **{name: zero.clone() for name in ("predicted", "variance", "squares")},
                "half_step_variance": (0.5 * forward.stderr).square(),
            }
            return _terms(step - 1, why_none, (nan, nan, one), (zero, zero, one), (zero, zero, one))
        ahead_batches, ahead_variance = last["forward_batches"], last["forward_stderr"].square()
        trapezoid = 0.5 * ((last["forward"] if int(last["step"]) == step - 1 else nan) + backward.value)
        stderr = 0.5 * torch.hypot(last["forward_stderr"], backward.stderr)
        batches = _batches_of_sum(ahead_variance, ahead_batches, backward.stderr.square(), backward.batches)
        predicted, variance = last["predicted"] + trapezoid, last["variance"] + last["half_step_variance"]
        end = (0.5 * backward.stderr).square()
        squares = last["squares"] + last["half_step_variance"].square()
        with_end = squares + end.square()
        batches_of_sum = torch.where(with_end > 0, (variance + end).square() / with_end, 1.0)
        sums = {"predicted": predicted, "variance": variance, "squares": squares}
        # A new dictionary: the last one may still be read.
        self._state = last | now | sums | {"half_step_variance": half_step_stderr.square()}
        measured_stderr = torch.hypot(level.stderr, last["first_level_stderr"])
        return _terms(
            step - 1,
            why_none,
            (trapezoid, stderr, batches),
            (predicted, (variance + end).sqrt(), batches_of_sum),
            (level.value - last["first_level"], measured_stderr, one),
        )

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._state = dict(state)


def _terms(step: int, why_no_trapezoid: str, *numbers: tuple[Tensor, Tensor, Tensor]) -> TrapezoidTerms:
    """Returns SUMS about `step`, from the value, its error and its batches of each."""
    named = zip(SUMS, (why_no_trapezoid, HOLE_IN_SUM, ""), numbers, strict=True)
    return TrapezoidTerms(
        *(Quantity(name, value, error, step, why, batches) for name, why, (value, error, batches) in named)
    )


def _batches_of_sum(one: Tensor, one_batches: Tensor, other: Tensor, other_batches: Tensor) -> Tensor:
    """Returns how many batches of equal variance would give one + other as precisely as these two."""
    error = one / one_batches.sqrt() + other / other_batches.sqrt()
    return torch.where(error > 0, ((one + other) / error).square(), 1.0)

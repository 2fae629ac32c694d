"""The running sum of trapezoid estimates over steps, beside the measured change of the same quantity.

Step s moves θ_s to θ_{s+1}. Its change is ½(F_s + B_{s+1}): forward, from batch s, and backward, from batch s+1. Up to
batch s the sum is

    Σ_{j<s} ½(F_j + B_{j+1})  =  ½F_1 + Σ_{1<j<s} ½(F_j + B_j) + ½B_s,

one term per BATCH on the right. Batches are sampled afresh, so the errors of these terms are uncorrelated although
F_j and B_j share batch j, and the variances of the terms on the right add up. Σ v of batches with variances v has the
degrees of freedom of (Σ v)²/Σ v² equal ones (Satterthwaite).

The variances v of ½F_s and w of ½B_{s+1} may be averages over the same batches before, worth n and m of them. At worst
their errors, v/√n and w/√m but for a factor, add up: v + w is known as of (v + w)²/(v/√n + w/√m)² batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BatchTerms:
    """What one batch says; every tensor has the shape of the quantity, stderr beside value."""

    level: Tensor  # the quantity itself, measured on this batch
    level_stderr: Tensor
    forward: Tensor  # its predicted change over the step that this batch takes
    forward_stderr: Tensor
    forward_batches: Tensor  # so many batches of equal variance know that error as well
    backward: Tensor  # its change over the step before, seen from this batch
    backward_stderr: Tensor
    backward_batches: Tensor
    half_step_stderr: Tensor  # of ½(forward + backward), which share this batch's noise


@dataclass(frozen=True)
class TrapezoidTerms:
    """The change over the last closed step, and from the first batch to this one: predicted and measured."""

    trapezoid: Tensor
    trapezoid_stderr: Tensor
    trapezoid_batches: Tensor  # so many batches of equal variance would know that error as well
    predicted: Tensor
    predicted_stderr: Tensor
    predicted_batches: Tensor  # as for the trapezoid
    measured: Tensor
    measured_stderr: Tensor


class TrapezoidSum:
    """Sums trapezoids over consecutive steps. A nan in any of them stays: a sum with a hole is no sum."""

    def __init__(self) -> None:
        self._state: dict[str, Tensor] = {}

    def add(self, step: int, batch: BatchTerms) -> TrapezoidTerms:
        """Returns the sums up to this batch. At the first one no step is closed: the sums are 0, the trapezoid nan.

        A step that does not follow the last one leaves a hole: the predicted sum is nan from then on.
        """
        zero, nan = torch.zeros_like(batch.forward), torch.full_like(batch.forward, torch.nan)
        if not self._state:
            self._state = {"squares": zero.clone()}
            self._remember(step, batch, zero, zero.clone(), (0.5 * batch.forward_stderr).square(), batch)
            one = torch.ones_like(zero)
            return TrapezoidTerms(nan, nan, one, zero, zero, one, zero, zero)
        last = self._state
        forward = last["forward"] if int(last["step"]) == step - 1 else nan
        trapezoid = 0.5 * (forward + batch.backward)
        predicted = last["predicted"] + trapezoid
        variance = last["variance"] + last["half_step_variance"]
        end = (0.5 * batch.backward_stderr).square()
        # Before there were squares: as if all the variance so far were one batch's.
        squares = last.get("squares", last["variance"].square()) + last["half_step_variance"].square()
        sum_of_squares = squares + end.square()
        self._remember(step, batch, predicted, variance, batch.half_step_stderr.square())
        self._state["squares"] = squares
        return TrapezoidTerms(
            trapezoid=trapezoid,
            trapezoid_stderr=0.5 * torch.hypot(last["forward_stderr"], batch.backward_stderr),
            trapezoid_batches=_batches_of_sum(
                last["forward_stderr"].square(),
                last.get("forward_batches", torch.ones_like(zero)),  # before there were any: one
                batch.backward_stderr.square(),
                batch.backward_batches,
            ),
            predicted=predicted,
            predicted_stderr=(variance + end).sqrt(),
            predicted_batches=torch.where(sum_of_squares > 0, (variance + end).square() / sum_of_squares, 1.0),
            measured=batch.level - last["first_level"],
            measured_stderr=torch.hypot(batch.level_stderr, last["first_level_stderr"]),
        )

    def _remember(
        self,
        step: int,
        batch: BatchTerms,
        predicted: Tensor,
        variance: Tensor,
        half_step_variance: Tensor,
        first: BatchTerms | None = None,
    ) -> None:
        terms = {
            "step": torch.tensor(step),
            "forward": batch.forward,
            "forward_stderr": batch.forward_stderr,
            "forward_batches": batch.forward_batches,
            "predicted": predicted,
            "variance": variance,
            "half_step_variance": half_step_variance,
        }
        if first is not None:
            terms |= {"first_level": first.level, "first_level_stderr": first.level_stderr}
        self._state = {**self._state, **terms}  # a new dictionary: the last one may still be read

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._state = dict(state)


def _batches_of_sum(one: Tensor, of_one: Tensor, other: Tensor, of_other: Tensor) -> Tensor:
    """Returns of how many equal batches one + other is known, two variances that are known of so many, and together."""
    error = one / of_one.sqrt() + other / of_other.sqrt()
    return torch.where(error > 0, ((one + other) / error).square(), 1.0)

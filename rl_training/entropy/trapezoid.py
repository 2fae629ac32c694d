"""The running sum of trapezoid estimates over steps, beside the measured change of the same quantity.

Step s moves θ_s to θ_{s+1}. Its change is ½(F_s + B_{s+1}): forward, from batch s, and backward, from batch s+1. Up to
batch s the sum is

    Σ_{j<s} ½(F_j + B_{j+1})  =  ½F_1 + Σ_{1<j<s} ½(F_j + B_j) + ½B_s,

one term per BATCH on the right. Batches are sampled afresh, so the errors of these terms are uncorrelated although
F_j and B_j share batch j, and the variances of the terms on the right add up. Σ v of batches with variances v has the
degrees of freedom of (Σ v)²/Σ v² equal ones (Satterthwaite).

A step that has no trapezoid is bridged, with a wider bar:

    B_{s+1}            where only F_s is missing. Its bias is half of the step's second order, ½(B − F). The root mean
                       square of that over the steps that have a trapezoid is added to the error, as if all bridged
                       steps had a bias of the same sign;
    level_b − level_a  the measured change from batch a to batch b, otherwise: also over steps that were not measured,
                       and before any step has a trapezoid.

A batch's term then has, at worst, the sum of the standard errors of its parts in both steps. A sum without any
trapezoid is not a prediction, and is nan.

The variances v of ½F_s and w of ½B_{s+1} may be averages over the same earlier batches, worth n and m of them. At worst
their errors, v/√n and w/√m up to a factor, add up. Then v + w is worth (v + w)²/(v/√n + w/√m)² batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_training.step.quantities import Quantity

SUMS = ("trapezoid", "cumulative_predicted", "cumulative_measured")
HALF = "it needs this step's backward and the last one's forward, and one of them is not finite or was not asked for"
NO_BAR = "no error bar: one of the batches that it sums over had too few folds"
# How the change over the step before a batch is known, entry by entry.
NOTHING, TRAPEZOID, BACKWARD, MEASURED = range(4)
BRIDGES = {BACKWARD: "by backward alone", MEASURED: "by the measured change"}


class TrapezoidTerms(NamedTuple):
    """SUMS: the change over the last closed step, and from the first batch to this one, predicted and measured."""

    trapezoid: Quantity
    predicted: Quantity
    measured: Quantity


@dataclass(frozen=True)
class TrapezoidSum:
    """The sum of trapezoids up to a batch, with bridges over steps that have none. See the module's docstring.

    Tensors have the shape of the quantity, entry by entry, but for `bridged`.
    """

    step: int  # that the last batch takes; 0: there is no batch yet
    first_level: Tensor  # the quantity itself, on the first batch
    first_level_stderr: Tensor
    level: Tensor  # on the last one
    level_stderr: Tensor
    forward: Tensor  # its predicted change over the step that the last batch takes
    forward_stderr: Tensor
    forward_batches: Tensor
    half_step_stderr: Tensor  # of ½(forward + backward) from the last batch
    predicted: Tensor  # the sum
    variance: Tensor  # of the sum, but for the last batch's part
    squares: Tensor  # of the variances that add up to it
    closed: Tensor  # how many steps have a trapezoid
    second_order: Tensor  # Σ (½ of their second order)²
    offset: Tensor  # Σ of what bridges by backward may be off
    part: Tensor  # how the change over the step before the last batch is known
    part_stderr: Tensor  # the last batch's part of it
    bridged: Tensor  # (2, 2): by each way of BRIDGES how many steps, and the last of them

    @classmethod
    def empty(cls, *shape: int) -> TrapezoidSum:
        """Return the sum of a quantity of this shape before the first batch."""
        names = [field.name for field in dataclasses.fields(cls) if field.name not in ("step", "bridged")]
        zeros: dict[str, Any] = {name: torch.zeros(shape, dtype=torch.float64) for name in names}
        return cls(step=0, bridged=torch.zeros(len(BRIDGES), 2, dtype=torch.long), **zeros)

    def add(
        self, step: int, level: Quantity, forward: Quantity, backward: Quantity, half_step_stderr: Tensor
    ) -> tuple[TrapezoidSum, TrapezoidTerms]:
        """Return the sum with another batch, and what it says. At the first batch sums are 0, and the trapezoid is nan.

        Args:
            step: the number of the optimizer step that the batch takes.
            level: the quantity itself, measured on this batch.
            forward: its predicted change over the step that the batch takes.
            backward: its change over the step before, seen from this batch.
            half_step_stderr: of ½(forward + backward), which share this batch's noise.
        """
        zeros, ones, nans = (torch.full_like(forward.value, number) for number in (0.0, 1.0, torch.nan))
        limit = backward.reason or forward.reason or HALF
        now: dict[str, Any] = {
            "step": step,
            "level": level.value,
            "level_stderr": level.stderr,
            "forward": forward.value,
            "forward_stderr": forward.stderr,
            "forward_batches": forward.batches,
            "half_step_stderr": half_step_stderr,
        }
        if not self.step:
            first = dataclasses.replace(self, **now, first_level=level.value, first_level_stderr=level.stderr)
            unknown = (nans, nans, ones)
            zero = (zeros, zeros, ones)
            return first, _terms(step - 1, (limit, "", ""), (unknown, zero, zero))
        trapezoid = 0.5 * ((self.forward if self.step == step - 1 else nans) + backward.value)
        stderr = 0.5 * torch.hypot(self.forward_stderr, backward.stderr)
        batches = _batches_of_sum(
            self.forward_stderr.square(), self.forward_batches, backward.stderr.square(), backward.batches
        )
        longer = dataclasses.replace(self, **now, **_closed(self, step, level, backward, trapezoid))
        predicted, error, known = _summed(longer)
        reason = "" if predicted.isfinite().any() else limit
        remark = NO_BAR if error.isnan().all() else _remark(longer.bridged)
        measured_stderr = torch.hypot(level.stderr, self.first_level_stderr)
        terms = _terms(
            step - 1,
            (limit, reason, ""),
            (
                (trapezoid, stderr, batches),
                (predicted, error, known),
                (level.value - self.first_level, measured_stderr, ones),
            ),
            remark,
        )
        return longer, terms


def _closed(last: TrapezoidSum, step: int, level: Quantity, backward: Quantity, trapezoid: Tensor) -> dict[str, Any]:
    """Return the fields of the sum that change when the change since the last batch is added."""
    follows = last.step == step - 1
    closes = trapezoid.isfinite()
    by_backward = ~closes & backward.value.isfinite() & (last.closed > 0) & follows
    part = torch.where(closes, TRAPEZOID, torch.where(by_backward, BACKWARD, MEASURED)).to(last.part)
    change = _chosen(part, trapezoid, backward.value, level.value - last.level)
    # The last batch's error, from its parts in the steps before and after it.
    ahead = _chosen(part, 0.5 * last.forward_stderr, torch.zeros_like(change), last.level_stderr)
    of_last = (last.part_stderr + ahead).square()
    of_last = torch.where((part == TRAPEZOID) & (last.part == TRAPEZOID), last.half_step_stderr.square(), of_last)
    of_last = torch.where((part == MEASURED) & (last.part == MEASURED), 0.0, of_last)  # its level cancels
    second_order = last.second_order + torch.where(closes, (trapezoid - last.forward).square(), 0.0)
    closed = last.closed + closes
    off = torch.where(by_backward, (second_order / closed).sqrt(), 0.0)
    return {
        "predicted": last.predicted + change,
        "variance": last.variance + of_last,
        "squares": last.squares + of_last.square(),
        "closed": closed,
        "second_order": second_order,
        "offset": last.offset + off,
        "part": part,
        "part_stderr": _chosen(part, 0.5 * backward.stderr, backward.stderr, level.stderr),
        "bridged": torch.stack(
            [
                _counted(count, is_bridged, last.step, step - 1)
                for count, is_bridged in zip(last.bridged, (by_backward, part == MEASURED), strict=True)
            ]
        ),
    }


def _chosen(part: Tensor, trapezoid: Tensor, backward: Tensor, measured: Tensor) -> Tensor:
    return torch.where(part == TRAPEZOID, trapezoid, torch.where(part == BACKWARD, backward, measured))


def _counted(count: Tensor, is_bridged: Tensor, first: int, last: int) -> Tensor:
    """Count the steps first … last if they are bridged. `count` is the number of bridged steps and the last of them."""
    if not bool(is_bridged.flatten()[0]):  # per token
        return count
    return count.new_tensor([int(count[0]) + last - first + 1, last])


def _summed(state: TrapezoidSum) -> tuple[Tensor, Tensor, Tensor]:
    """Return the predicted sum, nan without trapezoids, its error, and its effective number of batches."""
    end = state.part_stderr.square()
    offset = state.offset.square()
    total = state.variance + end + offset
    squares = state.squares + end.square() + offset.square()
    batches = torch.where(squares > 0, total.square() / squares, 1.0)
    return torch.where(state.closed > 0, state.predicted, torch.nan), total.sqrt(), batches


def _remark(bridged: Tensor) -> str:
    """Say which steps are bridged, and how; "" for none."""
    ways = [
        f"step {last} {how}" if count == 1 else f"{count} steps {how}, the last of them {last}"
        for (count, last), how in zip(bridged.tolist(), BRIDGES.values(), strict=True)
        if count
    ]
    return f"bridged: {'; '.join(ways)}" if ways else ""


def _terms(
    step: int, reasons: Sequence[str], numbers: Sequence[tuple[Tensor, Tensor, Tensor]], remark: str = ""
) -> TrapezoidTerms:
    """Return SUMS about `step`, from the reason if it is missing, and the value, its error and its batches, of each."""
    trapezoid, predicted, measured = (
        Quantity(name, value, error, step, why, batches)
        for name, why, (value, error, batches) in zip(SUMS, reasons, numbers, strict=True)
    )
    return TrapezoidTerms(trapezoid, dataclasses.replace(predicted, remark=remark), measured)


def _batches_of_sum(a: Tensor, batches_a: Tensor, b: Tensor, batches_b: Tensor) -> Tensor:
    """Return the effective number of batches behind the variance a + b, from those behind a and b."""
    error = a / batches_a.sqrt() + b / batches_b.sqrt()
    return torch.where(error > 0, ((a + b) / error).square(), 1.0)

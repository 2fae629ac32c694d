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
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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


class TrapezoidSum:
    """The sum of trapezoids over steps, with bridges over steps that have none. See the module's docstring."""

    def __init__(self) -> None:
        self._state: dict[str, Tensor] = {}

    def add(
        self, step: int, level: Quantity, forward: Quantity, backward: Quantity, half_step_stderr: Tensor
    ) -> TrapezoidTerms:
        """Add a batch, and return the sums up to it. At the first batch sums are 0, and the trapezoid is nan.

        Args:
            step: the number of the optimizer step that the batch takes.
            level: the quantity itself, measured on this batch.
            forward: its predicted change over the step that the batch takes.
            backward: its change over the step before, seen from this batch.
            half_step_stderr: of ½(forward + backward), which share this batch's noise.
        """
        zeros, ones, nans = (torch.full_like(forward.value, number) for number in (0.0, 1.0, torch.nan))
        limit = backward.reason or forward.reason or HALF
        now = {
            "step": torch.tensor(step),
            "level": level.value,
            "level_stderr": level.stderr,
            "forward": forward.value,
            "forward_stderr": forward.stderr,
            "forward_batches": forward.batches,
            "half_step_stderr": half_step_stderr,
        }
        last = self._state
        if not last:
            sums = ("predicted", "variance", "squares", "closed", "second_order", "offset", "part_stderr")
            self._state = now | {
                "first_level": level.value.clone(),
                "first_level_stderr": level.stderr.clone(),
                "bridged": torch.zeros(len(BRIDGES), 2, dtype=torch.long),  # how many steps, and the last of them
                "part": torch.full_like(zeros, NOTHING),
                **{name: zeros.clone() for name in sums},
            }
            return _terms(step - 1, (limit, "", ""), ((nans, nans, ones), (zeros, zeros, ones), (zeros, zeros, ones)))
        trapezoid = 0.5 * ((last["forward"] if int(last["step"]) == step - 1 else nans) + backward.value)
        stderr = 0.5 * torch.hypot(last["forward_stderr"], backward.stderr)
        batches = _batches_of_sum(
            last["forward_stderr"].square(), last["forward_batches"], backward.stderr.square(), backward.batches
        )
        self._state = (
            last | now | _closed(last, step, level, backward, trapezoid)
        )  # a new dict: the last state may still be read
        predicted, error, known = _summed(self._state)
        reason = "" if predicted.isfinite().any() else limit
        remark = NO_BAR if error.isnan().all() else _remark(self._state["bridged"])
        measured_stderr = torch.hypot(level.stderr, last["first_level_stderr"])
        return _terms(
            step - 1,
            (limit, reason, ""),
            (
                (trapezoid, stderr, batches),
                (predicted, error, known),
                (level.value - last["first_level"], measured_stderr, ones),
            ),
            remark,
        )

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._state = dict(state)


def _closed(
    last: Mapping[str, Tensor], step: int, level: Quantity, backward: Quantity, trapezoid: Tensor
) -> dict[str, Tensor]:
    """Return the entries of the state that change when the change since the last batch is added."""
    follows = int(last["step"]) == step - 1
    closes = trapezoid.isfinite()
    by_backward = ~closes & backward.value.isfinite() & (last["closed"] > 0) & follows
    part = torch.where(closes, TRAPEZOID, torch.where(by_backward, BACKWARD, MEASURED)).to(last["part"])
    change = _chosen(part, trapezoid, backward.value, level.value - last["level"])
    # The last batch's error, from its parts in the steps before and after it.
    ahead = _chosen(part, 0.5 * last["forward_stderr"], torch.zeros_like(change), last["level_stderr"])
    of_last = (last["part_stderr"] + ahead).square()
    of_last = torch.where((part == TRAPEZOID) & (last["part"] == TRAPEZOID), last["half_step_stderr"].square(), of_last)
    of_last = torch.where((part == MEASURED) & (last["part"] == MEASURED), 0.0, of_last)  # its level cancels
    second_order = last["second_order"] + torch.where(closes, (trapezoid - last["forward"]).square(), 0.0)
    closed = last["closed"] + closes
    off = torch.where(by_backward, (second_order / closed).sqrt(), 0.0)
    return {
        "predicted": last["predicted"] + change,
        "variance": last["variance"] + of_last,
        "squares": last["squares"] + of_last.square(),
        "closed": closed,
        "second_order": second_order,
        "offset": last["offset"] + off,
        "part": part,
        "part_stderr": _chosen(part, 0.5 * backward.stderr, backward.stderr, level.stderr),
        "bridged": torch.stack(
            [
                _counted(count, is_bridged, int(last["step"]), step - 1)
                for count, is_bridged in zip(last["bridged"], (by_backward, part == MEASURED), strict=True)
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


def _summed(state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the predicted sum, nan without trapezoids, its error, and its effective number of batches."""
    end = state["part_stderr"].square()
    offset = state["offset"].square()
    total = state["variance"] + end + offset
    squares = state["squares"] + end.square() + offset.square()
    batches = torch.where(squares > 0, total.square() / squares, 1.0)
    return torch.where(state["closed"] > 0, state["predicted"], torch.nan), total.sqrt(), batches


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

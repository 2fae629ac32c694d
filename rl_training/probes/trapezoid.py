"""The running sum of trapezoid estimates over steps, to be compared with the measured change of the same quantity.

Step s moves θ_s to θ_{s+1}. Its change is estimated as ½(F_s + B_{s+1}): forward from batch s, backward from batch s+1.
The sum up to batch s is

    Σ_{j<s} ½(F_j + B_{j+1})  =  ½F_1 + Σ_{1<j<s} ½(F_j + B_j) + ½B_s,

with one term per BATCH on the right. F_j and B_j share batch j, but batches are sampled independently. So the errors of
the terms on the right are uncorrelated, and their variances add up. Σ v over batches with variances v has the degrees
of freedom of (Σ v)²/Σ v² batches with equal variances (Satterthwaite).

A step without a trapezoid is bridged, with a wider error bar:

    B_{s+1}            if only F_s is missing. The bias is half of the step's second order, ½(B − F). Its root mean
                       square over the steps that have a trapezoid is added to the error, as if the biases of all
                       bridged steps had the same sign;
    level_b − level_a  otherwise: the measured change from batch a to batch b. This also bridges steps that were not
                       measured, and steps before the first trapezoid.

The standard error of a batch's term is then, at worst, the sum of the standard errors of its parts in both steps. A sum
without any trapezoid is not a prediction, so it is nan.

The variances v of ½F_s and w of ½B_{s+1} may be averages over the same earlier batches, with effective numbers of
batches n and m. In the worst case their errors, v/√n and w/√m up to a factor, add up. Then the effective number behind
v + w is (v + w)²/(v/√n + w/√m)².
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_training.entropy.data import Quantity

SUMS = ("trapezoid", "cumulative_predicted", "cumulative_measured")
MISSING_TERM = (
    "it needs this step's backward and the last one's forward, and one of them is not finite or was not asked for"
)
NO_BAR = "no error bar: one of the batches that it sums over had too few folds"
# How the change over the step before a batch is estimated, entry by entry.
NO_ESTIMATE, TRAPEZOID, BACKWARD, MEASURED = range(4)
BRIDGES = {BACKWARD: "by backward alone", MEASURED: "by the measured change"}


class TrapezoidTerms(NamedTuple):
    """The three SUMS: the change over the previous step, and the changes since the first batch."""

    trapezoid: Quantity  # over the previous step
    predicted: Quantity  # since the first batch
    measured: Quantity  # since the first batch


@dataclass(frozen=True)
class TrapezoidSum:
    """The sum of trapezoids up to a batch, with bridges over steps that have none. See the module's docstring.

    All tensors except `bridged` have the shape of the quantity.
    """

    step: int  # the step taken with the last batch; 0: there is no batch yet
    first_level: Tensor  # the quantity itself, on the first batch
    first_level_stderr: Tensor
    level: Tensor  # the quantity itself, on the last batch
    level_stderr: Tensor
    forward: Tensor  # the quantity's predicted change over the step taken with the last batch
    forward_stderr: Tensor
    forward_batches: Tensor  # effective number of batches behind forward_stderr
    half_step_stderr: Tensor  # of ½(forward + backward) from the last batch
    predicted: Tensor  # the sum
    variance: Tensor  # of the sum, without the last batch's part
    squared_variances: Tensor  # Σ v² over the variances v that add up to `variance`
    num_trapezoids: Tensor  # how many steps have a trapezoid
    second_order: Tensor  # Σ (½ of the second order)² over these steps
    bias: Tensor  # sum of the possible biases of bridges by backward
    source: Tensor  # how the change over the step before the last batch is estimated: TRAPEZOID, BACKWARD, …
    source_stderr: Tensor  # the last batch's contribution to that estimate's standard error
    bridged: Tensor  # (2, 2): for each entry of BRIDGES, the number of steps bridged, and the last of them

    @classmethod
    def empty(cls, *shape: int) -> TrapezoidSum:
        """Return the sum before the first batch, for a quantity of this shape."""
        names = [field.name for field in dataclasses.fields(cls) if field.name not in ("step", "bridged")]
        zeros: dict[str, Any] = {name: torch.zeros(shape, dtype=torch.float64) for name in names}
        return cls(step=0, bridged=torch.zeros(len(BRIDGES), 2, dtype=torch.long), **zeros)

    def add(
        self, step: int, level: Quantity, forward: Quantity, backward: Quantity, half_step_stderr: Tensor
    ) -> tuple[TrapezoidSum, TrapezoidTerms]:
        """Return the sum including another batch, and its terms. At the first batch, sums are 0 and trapezoid is nan.

        Args:
            step: The number of the optimizer step taken with this batch.
            level: The quantity itself, measured on this batch.
            forward: Its predicted change over the step taken with this batch.
            backward: Its change over the previous step, predicted from this batch.
            half_step_stderr: The error of ½(forward + backward), which share this batch's noise.
        """
        zeros, ones, nans = (torch.full_like(forward.value, number) for number in (0.0, 1.0, torch.nan))
        no_term = backward.reason or forward.reason or MISSING_TERM
        batch_fields: dict[str, Any] = {
            "step": step,
            "level": level.value,
            "level_stderr": level.stderr,
            "forward": forward.value,
            "forward_stderr": forward.stderr,
            "forward_batches": forward.batches,
            "half_step_stderr": half_step_stderr,
        }
        if not self.step:
            first = dataclasses.replace(self, **batch_fields, first_level=level.value, first_level_stderr=level.stderr)
            unknown = (nans, nans, ones)
            zero = (zeros, zeros, ones)
            return first, _terms(step - 1, (no_term, "", ""), (unknown, zero, zero))
        trapezoid = 0.5 * ((self.forward if self.step == step - 1 else nans) + backward.value)
        stderr = 0.5 * torch.hypot(self.forward_stderr, backward.stderr)
        batches = _batches_of_sum(
            self.forward_stderr.square(), self.forward_batches, backward.stderr.square(), backward.batches
        )
        extended = dataclasses.replace(self, **batch_fields, **_fields_after(self, step, level, backward, trapezoid))
        predicted, error, batches_of_sum = _total(extended)
        reason = "" if predicted.isfinite().any() else no_term
        remark = NO_BAR if error.isnan().all() else _remark(extended.bridged)
        measured_stderr = torch.hypot(level.stderr, self.first_level_stderr)
        terms = _terms(
            step - 1,
            (no_term, reason, ""),
            (
                (trapezoid, stderr, batches),
                (predicted, error, batches_of_sum),
                (level.value - self.first_level, measured_stderr, ones),
            ),
            remark,
        )
        return extended, terms


def _fields_after(
    last: TrapezoidSum, step: int, level: Quantity, backward: Quantity, trapezoid: Tensor
) -> dict[str, Any]:
    """Return the updated fields of the sum after adding the change since the last batch."""
    is_next = last.step == step - 1
    has_trapezoid = trapezoid.isfinite()
    by_backward = ~has_trapezoid & backward.value.isfinite() & (last.num_trapezoids > 0) & is_next
    source = torch.where(has_trapezoid, TRAPEZOID, torch.where(by_backward, BACKWARD, MEASURED)).to(last.source)
    change = _select(source, trapezoid, backward.value, level.value - last.level)
    # The variance of the last batch's term, from its parts in the steps before and after it.
    stderr_after = _select(source, 0.5 * last.forward_stderr, torch.zeros_like(change), last.level_stderr)
    term_variance = (last.source_stderr + stderr_after).square()
    is_between_trapezoids = (source == TRAPEZOID) & (last.source == TRAPEZOID)
    term_variance = torch.where(is_between_trapezoids, last.half_step_stderr.square(), term_variance)
    is_level_cancelled = (source == MEASURED) & (last.source == MEASURED)
    term_variance = torch.where(is_level_cancelled, 0.0, term_variance)
    second_order = last.second_order + torch.where(has_trapezoid, (trapezoid - last.forward).square(), 0.0)
    num_trapezoids = last.num_trapezoids + has_trapezoid
    bias = torch.where(by_backward, (second_order / num_trapezoids).sqrt(), 0.0)
    return {
        "predicted": last.predicted + change,
        "variance": last.variance + term_variance,
        "squared_variances": last.squared_variances + term_variance.square(),
        "num_trapezoids": num_trapezoids,
        "second_order": second_order,
        "bias": last.bias + bias,
        "source": source,
        "source_stderr": _select(source, 0.5 * backward.stderr, backward.stderr, level.stderr),
        "bridged": torch.stack(
            [
                _count_bridged(count, is_bridged, last.step, step - 1)
                for count, is_bridged in zip(last.bridged, (by_backward, source == MEASURED), strict=True)
            ]
        ),
    }


def _select(source: Tensor, trapezoid: Tensor, backward: Tensor, measured: Tensor) -> Tensor:
    return torch.where(source == TRAPEZOID, trapezoid, torch.where(source == BACKWARD, backward, measured))


def _count_bridged(count: Tensor, is_bridged: Tensor, first: int, last: int) -> Tensor:
    """Add the steps first … last, if bridged, to `count`, which is (number of bridged steps, last of them)."""
    if not bool(is_bridged.flatten()[0]):  # the entry per token decides
        return count
    return count.new_tensor([int(count[0]) + last - first + 1, last])


def _total(state: TrapezoidSum) -> tuple[Tensor, Tensor, Tensor]:
    """Return the predicted sum (nan without trapezoids), its error, and the effective number of batches behind it."""
    last_variance = state.source_stderr.square()
    squared_bias = state.bias.square()
    variance = state.variance + last_variance + squared_bias
    squared_variances = state.squared_variances + last_variance.square() + squared_bias.square()
    batches = torch.where(squared_variances > 0, variance.square() / squared_variances, 1.0)
    return torch.where(state.num_trapezoids > 0, state.predicted, torch.nan), variance.sqrt(), batches


def _remark(bridged: Tensor) -> str:
    """Return a text that says which steps are bridged, and how; "" for none."""
    parts = [
        f"step {last} {method}" if count == 1 else f"{count} steps {method}, the last of them {last}"
        for (count, last), method in zip(bridged.tolist(), BRIDGES.values(), strict=True)
        if count
    ]
    return f"bridged: {'; '.join(parts)}" if parts else ""


def _terms(
    step: int, reasons: Sequence[str], numbers: Sequence[tuple[Tensor, Tensor, Tensor]], remark: str = ""
) -> TrapezoidTerms:
    """Return the three SUMS as quantities about `step`.

    Args:
        step: The step that they refer to.
        reasons: For each of SUMS, the reason why it is missing, or "".
        numbers: For each of SUMS, its value, its error and the effective number of batches.
        remark: A remark on the predicted sum.
    """
    trapezoid, predicted, measured = (
        Quantity(name, value, error, step, batches, reason)
        for name, reason, (value, error, batches) in zip(SUMS, reasons, numbers, strict=True)
    )
    return TrapezoidTerms(trapezoid, dataclasses.replace(predicted, remark=remark), measured)


def _batches_of_sum(a: Tensor, batches_a: Tensor, b: Tensor, batches_b: Tensor) -> Tensor:
    """Return the effective number of batches behind the variance a + b, given those behind a and b."""
    error = a / batches_a.sqrt() + b / batches_b.sqrt()
    return torch.where(error > 0, ((a + b) / error).square(), 1.0)

"""Checks of every kernel: its loss, its rows against ordinary backwards, and the sum over all pairs against x̄·δθ.

The loss is checked before the analysis. calculate.py runs the other checks. A kernel that fails one is not written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.hosts.trl.settings.loss import DR_GRPO, loss_settings
from rl_training.hosts.trl.trainer import GRPOTrainer
from rl_training.offline.kernel.blocks import KernelInputs, KernelRows

MAX_ERROR = 1e-4  # relative, fp32: Σ A_j W_j against the batch gradient, and a row against its sequence's own backward
# Settings with which the gradient of U is not Dr-GRPO's sum of rows; the others change advantages, or need a ratio ≠ 1.
NOT_A_SUM_OF_ROWS = {"loss_type", "entropy_coef", "top_entropy_quantile"}


def refuse_other_loss(trainer: GRPOTrainer) -> None:
    """Raise a UserError if the gradient of this trainer's loss is not −(1/N_U) Σ_j (A_j/L) W_j."""
    differs = sorted(NOT_A_SUM_OF_ROWS & loss_settings(trainer).differs)
    if differs:
        neutral = ", ".join(f"{name}={DR_GRPO[name]!r}" for name in differs)
        raise UserError(
            f"the kernel is of Dr-GRPO's loss, and this one differs in {', '.join(differs)}: make the trainer with "
            f"{neutral}, or analyze with kernel.enabled=false"
        )


def check_sum(rows: KernelRows, inputs: KernelInputs, total: Tensor) -> None:
    """Raise a UserError if the rows of U do not add up to the batch gradient.

    Args:
        total: Σ_j A_j W_j, (P,) fp64.
    """
    expected = -inputs.update.num_sequences * inputs.max_length * inputs.gradient.double()
    if expected.any():  # it is 0 if no sequence has an advantage
        _require_close(
            total, expected, rows.tolerance_factor,
            "the sum of the update sequences' gradients differs from the batch gradient by {}: some use of a parameter "
            "is not seen by hooks in this model, and its kernel would be wrong",
        )  # fmt: skip


def check_row(rows: KernelRows, inputs: KernelInputs, row: int, gradient: Tensor) -> None:
    """Raise a UserError if a row differs from the gradient of an ordinary backward of its sequence alone.

    Args:
        row: Number of the sequence in E.
        gradient: Its row W_i, (P,).
    """
    expected = rows.sum(inputs.evaluation, rows.batches([row])[0], torch.ones_like(inputs.logp_weights))
    _require_close(
        gradient, expected, rows.tolerance_factor,
        f"the gradient of evaluation sequence {row} differs from its own backward by {{}}: the model mixes sequences "
        "of a batch, or a use of a parameter is not seen by hooks",
    )  # fmt: skip


def _require_close(measured: Tensor, expected: Tensor, tolerance_factor: float, message: str) -> None:
    error = float((measured - expected).norm() / expected.norm())
    limit = MAX_ERROR * tolerance_factor
    if not error <= limit:
        raise UserError(message.format(f"{error:.2g} of it (limit {limit:.2g})"))


def gradient_part(inputs: KernelInputs, total: Tensor) -> Tensor:
    """Return x̄·δθ for δθ = c M total /(N_U L), the gradient's part of the step, and a bound on its size, (2,) fp64.

    The bound is Cauchy–Schwarz's in the metric M: c |√M x̄| |√M total| /(N_U L).

    Args:
        total: Σ_j A_j W_j over U's rows, (P,) fp64.
    """
    scaled_x, scaled_total = (v.double() * inputs.sqrt_metric.double() for v in (inputs.entropy_gradient, total))
    return inputs.scale * torch.stack([scaled_x @ scaled_total, scaled_x.norm() * scaled_total.norm()]).cpu()


def check_identity(
    kernel: Mapping[str, Tensor], inputs: KernelInputs, by_rows: Tensor, by_batch: float, limit: float
) -> dict[str, str]:
    """Check the sum over all pairs against x̄·δθ, and return the sum and its errors as metadata of the file.

    Args:
        by_rows: Result of `gradient_part`, (2,): U's gradient is the sum of its rows.
        by_batch: x̄·δθ with U's batch gradient from the first pass.
        limit: Largest difference of the sum from `by_rows`, relative to the bound in `by_rows`.

    Returns:
        pairs_sum: the sum over all pairs, in nats per token.
        identity_error: its error relative to `by_rows`, from rounding products, stored rows and sums.
        cancellation: the bound in `by_rows` over its value. fp32 rounds at about 1e-7 of the bound.
        rounding_error: the error of `by_batch` relative to `by_rows`. Both sum one gradient in fp32, in different
            orders. The error is large in Adam's first steps, which divide by entries near 0: P is only as precise as
            these entries are.

    Raises:
        UserError: The sum over all pairs is wrong.
    """
    contributions = kernel["entropy_kernel"] @ kernel["advantages"].double()
    total = inputs.scale * float(contributions.mean())
    (value, bound) = by_rows.tolist()
    if not abs(total - value) <= limit * bound:
        raise UserError(
            f"the pairs add up to {total:.6g}, and the gradient part of the entropy change is {value:.6g}: rows of the "
            "kernel are missing or wrong; remove its folder and compute it again"
        )
    identity_error, rounding_error = ((abs(v - value) / abs(value) if value else abs(v)) for v in (total, by_batch))
    return {
        "pairs_sum": repr(total), "identity_error": repr(identity_error), "rounding_error": repr(rounding_error),
        "cancellation": repr(bound / abs(value) if value else math.inf),
    }  # fmt: skip

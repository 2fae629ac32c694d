"""The checks that every kernel must pass: the batch gradient, single backwards, the sum of all pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.offline.gradient_rows import GradientRows
from rl_training.offline.kernel_types import KernelInputs, KernelStep

MAX_SUM_ERROR = 1e-4  # of Σ A_j W_j against the batch gradient, in fp32
MAX_ROW_ERROR = 1e-4  # of a row against that sequence's own backward
MAX_IDENTITY_ERROR = {"float32": 1e-4, "bfloat16": 1e-2}  # of the sum over all pairs, by what rows are held in
ROUNDED = 300.0  # how much wider these limits are where the forward runs under bf16 autocast


def prove_sum(rows: GradientRows, inputs: KernelInputs, step: KernelStep, total: Tensor) -> None:
    """Raises ValueError when the rows of U do not add up to the batch gradient."""
    expected = -inputs.update.num_sequences * inputs.max_length * step.gradient.double()
    if not expected.any():
        return  # no sequence has an advantage
    error = float((total - expected).norm() / expected.norm())
    limit = MAX_SUM_ERROR * rows.rounding(ROUNDED)
    if not error <= limit:
        raise ValueError(
            f"the sum of the update sequences' gradients differs from the batch gradient by {error:.2g} of it "
            f"(limit {limit:.2g}): some use of a parameter is not seen by hooks in this model, and its kernel would be "
            "wrong"
        )


def prove_row(rows: GradientRows, inputs: KernelInputs, row: int, own: Tensor) -> None:
    """Raises ValueError when a row is not the gradient that an ordinary backward of its sequence alone gives."""
    alone = rows.sum(inputs.evaluation, rows.batches([row])[0], torch.ones_like(inputs.logp_weights))
    error, limit = float((own - alone).norm() / alone.norm()), MAX_ROW_ERROR * rows.rounding(ROUNDED)
    if not error <= limit:
        raise ValueError(
            f"the gradient of evaluation sequence {row} differs from its own backward by {error:.2g} of it (limit "
            f"{limit:.2g}): the model mixes sequences of a batch, or a use of a parameter is not seen by hooks"
        )


def gradient_part(inputs: KernelInputs, step: KernelStep, total: Tensor) -> Tensor:
    """Returns (x̄·δθ, |x̄| |δθ|), (2,) fp64, of δθ = c M total /(N_U L): this step's gradient as U's rows have it.

    total  (P,) fp64, Σ_j A_j W_j.  Norms are in the metric M; the second number bounds the first.
    """
    scale = step.clip / (inputs.update.num_sequences * inputs.max_length)
    x, moved = (v.double() * step.root.double() for v in (step.entropy_gradient, total))
    return scale * torch.stack([x @ moved, x.norm() * moved.norm()]).cpu()


def prove_identity(
    kernel: Mapping[str, Tensor], inputs: KernelInputs, step: KernelStep, by_rows: Tensor, by_batch: float, limit: float
) -> dict[str, str]:
    """Returns what the sum over all pairs and its errors are, for the file; raises ValueError where it is wrong.

    by_rows   (2,), `gradient_part`: with U's gradient as the sum of its rows
    by_batch  x̄·δθ with U's batch gradient from the first pass
    limit     of the difference from `by_rows`, relative to its bound

        identity_error  of the sum, relative to by_rows: the rounding of products, stored rows and sums
        cancellation    the bound of by_rows over its value: fp32 rounds at about 1e-7 of the bound
        rounding_error  of by_batch, relative to by_rows: one gradient summed in two orders in fp32. It is large where a
                        young Adam divides by entries that are nearly 0: P has no more digits than they have
    """
    contributions = kernel["entropy_kernel"] @ kernel["advantages"].double()
    scale = step.clip / (inputs.evaluation.num_sequences * inputs.update.num_sequences * inputs.max_length)
    total, (value, most) = scale * float(contributions.sum()), by_rows.tolist()
    if not abs(total - value) <= limit * most:
        raise ValueError(
            f"the pairs add up to {total:.6g}, and the gradient part of the entropy change is {value:.6g}: rows of the "
            "kernel are missing or wrong; remove its folder and calculate it anew"
        )
    identity, rounding = ((abs(v - value) / abs(value) if value else abs(v)) for v in (total, by_batch))
    return {
        "pairs_sum": repr(total), "identity_error": repr(identity), "rounding_error": repr(rounding),
        "cancellation": repr(most / abs(value) if value else math.inf),
    }  # fmt: skip

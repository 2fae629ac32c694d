"""Products of many long rows with many others, in blocks under a memory budget: the arithmetic of the sequence kernel.

With W_i = ∂S_i the gradient of sequence i's log-probability, δθ = −M ⊙ g the part of the optimizer's step that is this
step's gradient (M = κP: for AdamW κ = lr (1−β1)/(1−β1^t), P = 1/(√v̂ + ε) of THIS step; for SGD M = lr), c the clip
coefficient and g = −(1/N_U) Σ_j (A_j/L) W_j Dr-GRPO's gradient of the update sequences U,

    K(i, j) = Σ_α W_iα M_α W_jα                              what a step on j does to log π(i)
    X̃(i, j) = Σ_α x_iα M_α W_jα                              what it does to entropy as i sees it, x̄ = mean_i x_i = ∂H
    δH₁(gradient) = c /(N_E N_U L) Σ_i Σ_j X̃(i, j) A_j

√M goes into both sides, which leaves plain matrix products. E's rows are held, n_b at a time, U's stream by:

    seconds ≈ [N_U (1 + ⌈N_E/n_b⌉) + 1.6 N_E] t  +  (N_E + N_U) s  +  4 N_E N_U P / F

t is the time of one sequence's forward and backward (a second backward from the same forward costs 0.6 t), s that of
its summary (sketches, sketches.py; norm; products with δθ), F operations per second.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_training.engine.precision import ieee_fp32

COLUMNS = 2**14  # whose products are summed in fp32; beyond that, in fp64


def row_products(rows: Tensor, others: Tensor) -> Tensor:
    """Returns rows · othersᵀ, (n, q) fp64, of (n, P) and (q, P) of which either may be stored in bf16.

    Products and sums over COLUMNS columns are in fp32 (fp64 if a side is), those over all in fp64. The error in the
    Frobenius norm is about 1e-6 for fp32 rows of any length, and 2e-4 where one side was rounded to bf16.
    """
    dtype = torch.promote_types(torch.promote_types(rows.dtype, others.dtype), torch.float32)
    total = torch.zeros(len(rows), len(others), dtype=torch.float64, device=rows.device)
    with ieee_fp32():
        for a, b in zip(rows.split(COLUMNS, dim=1), others.split(COLUMNS, dim=1), strict=True):
            total += a.to(dtype) @ b.to(dtype).T
    return total


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Returns Σ_i weights_i rows_i, (P,) fp64, of (n,) weights and (n, P) rows; all sums are in fp64."""
    weights = weights.double()
    return torch.cat([weights @ part.double() for part in rows.split(COLUMNS, dim=1)])


def square_norms(rows: Tensor) -> Tensor:
    """Returns Σ_α rows_iα², (n,) fp64, of (n, P) rows; within COLUMNS columns the sum is in fp32."""
    return torch.stack([part.square().sum(dim=1).double() for part in rows.split(COLUMNS, dim=1)]).sum(dim=0)


def plan_blocks(
    num_held: int,
    num_parameters: int,
    *,
    memory_bytes: float,
    microbatch: int,
    bytes_per_entry: int = 4,
    num_ranks: int = 1,
) -> list[range]:
    """Returns the held rows in blocks, as large as fit into the budget, and at least one for each rank.

    The budget is for the held rows (two a sequence) and the fp32 rows of one microbatch that streams by.

    Raises ValueError, saying how much is enough, when not even one row fits.

    Rows of 10 parameters take 40 bytes; of 280, 40 are for the microbatch that streams by:

    >>> plan_blocks(4, 10, memory_bytes=280, microbatch=1)
    [range(0, 2), range(2, 4)]
    """
    streaming, per_row = 4 * microbatch * num_parameters, 2 * bytes_per_entry * num_parameters
    fitting = int((memory_bytes - streaming) // per_row)
    if fitting < 1:
        needed = (streaming + per_row) / 1e9
        raise ValueError(
            f"kernel.memory_gb={memory_bytes / 1e9:.3g} holds no row of {num_parameters} parameters beside a "
            f"microbatch of {microbatch}: give at least kernel.memory_gb={math.ceil(needed * 1000) / 1000}, or a "
            "smaller microbatch"
        )
    size = min(math.ceil(num_held / math.ceil(num_held / fitting)), math.ceil(num_held / num_ranks))
    return [range(first, min(first + size, num_held)) for first in range(0, num_held, size)]

"""Products of many long rows with many others, in blocks under a memory budget: the arithmetic of the sequence kernel.

With W_i = ∂S_i the gradient of sequence i's log-probability, δθ = −M ⊙ g the part of the optimizer's step that is this
step's gradient (M = κP: for AdamW κ = lr (1−β1)/(1−β1^t), P = 1/(√v̂ + ε) of THIS step; for SGD M = lr), c the clip
coefficient and g = −(1/N_U) Σ_j (A_j/L) W_j Dr-GRPO's gradient of the update sequences U,

    K(i, j) = Σ_α W_iα M_α W_jα                              what a step on j does to log π(i)
    X̃(i, j) = Σ_α x_iα M_α W_jα                              what it does to entropy as i sees it, x̄ = mean_i x_i = ∂H
    δH₁(gradient) = c /(N_E N_U L) Σ_i Σ_j X̃(i, j) A_j

√M goes into both sides, which leaves plain matrix products. E's rows are held, n_b at a time, U's stream by:

    seconds ≈ [N_U (1 + ⌈N_E/n_b⌉) + N_E (1 + 0.6 both)] t  +  (N_E + N_U) s  +  (1 + both) 2 N_E N_U P / F

t is the time of one sequence's forward and backward (a second backward from the same forward costs 0.6 t), s that of
its summary (sketches, sketches.py; norm; products with δθ), F operations per second, both = 1 where K and X̃
are wanted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.engine.precision import ieee_fp32

COLUMNS = 2**14  # whose products are summed in fp32; beyond that, in fp64
SECOND_BACKWARD = 0.6  # of a forward and backward


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


@dataclass(frozen=True)
class Blocks:
    """How a kernel is calculated under a memory budget, and what that will cost."""

    num_held: int  # N_E
    num_streamed: int  # N_U
    num_parameters: int  # P
    rows_per_block: int  # n_b
    both: bool

    @property
    def num_blocks(self) -> int:
        return math.ceil(self.num_held / self.rows_per_block)

    @property
    def passes(self) -> float:
        """Forwards with backward, in sequences: the bracket of the formula in the module's docstring."""
        streamed = self.num_streamed * (1 + self.num_blocks)
        return streamed + self.num_held * (1 + SECOND_BACKWARD * self.both)

    @property
    def operations(self) -> float:
        """Multiplications and additions of the products."""
        return 2.0 * (1 + self.both) * self.num_held * self.num_streamed * self.num_parameters

    def seconds(self, per_sequence: float, kept: float, operations_per_second: float) -> float:
        """Returns the time that the formula of the module's docstring gives, of t, s and F."""
        keeping = (self.num_held + self.num_streamed) * kept
        return self.passes * per_sequence + keeping + self.operations / operations_per_second


def plan_blocks(
    num_held: int,
    num_streamed: int,
    num_parameters: int,
    *,
    memory_bytes: float,
    microbatch: int,
    bytes_per_entry: int = 4,
    both: bool = True,
) -> Blocks:
    """Returns the largest blocks of held rows that fit into the budget, evened out over the number of blocks.

    The budget is for the held rows (one or two a sequence) and the fp32 rows of one microbatch that streams by.

    Raises ValueError, saying how much is enough, when not even one row fits.

    Rows of 10 parameters take 40 bytes; of 160, one is for the microbatch that streams by:

    >>> plan_blocks(3, 9, 10, memory_bytes=160, microbatch=1, both=False).rows_per_block
    3
    """
    streaming = 4 * microbatch * num_parameters
    per_row = bytes_per_entry * (1 + both) * num_parameters
    fitting = int((memory_bytes - streaming) // per_row)
    if fitting < 1:
        needed = (streaming + per_row) / 1e9
        raise ValueError(
            f"kernel.memory_gb={memory_bytes / 1e9:.3g} holds no row of {num_parameters} parameters beside a "
            f"microbatch of {microbatch}: give at least kernel.memory_gb={math.ceil(needed * 1000) / 1000}, or a "
            "smaller microbatch"
        )
    blocks = math.ceil(num_held / min(fitting, num_held))
    return Blocks(num_held, num_streamed, num_parameters, math.ceil(num_held / blocks), both)

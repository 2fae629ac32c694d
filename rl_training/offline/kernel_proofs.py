"""What every kernel is held against before it counts: the batch gradient, single backwards, the sum of all pairs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.offline.gradient_rows import GradientRows
from rl_training.offline.kernel_types import Question, Step

MAX_SUM_ERROR = 1e-4  # of Σ A_j W_j against the batch gradient, in fp32
MAX_ROW_ERROR = 1e-4  # of a row against that sequence's own backward
ROUNDED = 300.0  # how much wider these limits are where the forward runs under bf16 autocast


def prove_sum(rows: GradientRows, question: Question, step: Step, total: Tensor) -> None:
    """Raises ValueError when the rows of U do not add up to the batch gradient."""
    expected = -question.update.num_sequences * question.max_length * step.gradient.double()
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


def prove_row(rows: GradientRows, question: Question, row: int, own: Tensor) -> None:
    """Raises ValueError when a row is not the gradient that an ordinary backward of its sequence alone gives."""
    alone = rows.sum(question.evaluation, rows.batches([row])[0], torch.ones_like(question.logp_weights))
    error, limit = float((own - alone).norm() / alone.norm()), MAX_ROW_ERROR * rows.rounding(ROUNDED)
    if not error <= limit:
        raise ValueError(
            f"the gradient of evaluation sequence {row} differs from its own backward by {error:.2g} of it (limit "
            f"{limit:.2g}): the model mixes sequences of a batch, or a use of a parameter is not seen by hooks"
        )


def identity_error(kernel: Mapping[str, Tensor], clip: float, max_length: int, expected: float) -> tuple[float, float]:
    """Returns the sum over all pairs, and its difference from x̄·δθ_gradient relative to that."""
    contributions = kernel["entropy_kernel"] @ kernel["advantages"].double()
    num_e, num_u = kernel["entropy_kernel"].shape
    total = clip * float(contributions.sum()) / (num_e * num_u * max_length)
    return total, abs(total - expected) / abs(expected) if expected else abs(total)

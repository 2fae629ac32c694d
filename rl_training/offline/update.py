"""The step that the optimizer would make from the checkpoint with U, in parts, and without each fold of U.

The loss is Dr-GRPO's at its first step on fresh responses, where every ratio is 1, so that its gradient is the mean of

    −(A_i / L) ∂S_i        A_i the advantage, S_i the log-probability of sequence i, L the longest completion allowed

over all sequences of U. Those with A_i = 0 count in the mean and cost nothing. Folds are consecutive prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.engine.updates import Piece, optimizer_pieces
from rl_training.mathematics.adamw import UpdateParts, clip_coefficient
from rl_training.mathematics.folds import leave_fold_out
from rl_training.mathematics.vectors import Layout
from rl_training.offline.buffers import UpdateBuffer
from rl_training.offline.flat_vectors import FlatVectors
from rl_training.offline.phases import Progress
from rl_training.offline.standing import Standing

MOST_FOLDS = 16  # a vector over the trainable parameters each
NEUTRAL_LOSS = {
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
}


@dataclass(frozen=True)
class Update:
    """δθ and what it is made of: flat vectors over the trainable parameters, the same on every process."""

    gradient: Tensor  # (P,), mean over U, not clipped
    clip: float  # by how much it is shortened
    parts: UpdateParts  # of (P,): momentum, gradient, decay
    delta: Tensor  # (P,), their sum
    pieces: list[Piece]
    folds: FlatVectors  # row k is the mean gradient of this process's fold k
    fold_number: tuple[int, ...]  # which of all folds that is
    num_folds: int  # of all processes
    max_grad_norm: float

    def without_fold(self, k: int) -> UpdateParts:
        """Returns the parts, (P,) each, of the step that the other folds alone would make."""
        row = self.folds.matrix[k : k + 1].to(self.gradient.device)
        gradient = leave_fold_out(self.gradient, row, torch.ones(1, device=row.device), float(self.num_folds))[0]
        return _in_parts(self.pieces, gradient, self.max_grad_norm)[0]


def make_update(
    standing: Standing, update: UpdateBuffer, microbatch_size: int, offload: bool, progress: Progress
) -> Update:
    """Returns the step that U makes.

    offload  keep the folds' gradients in host memory
    """
    _refuse_other_losses(standing)
    fold_prompts = math.gcd(update.chunk_prompts, -(-update.num_prompts // MOST_FOLDS))
    fold = update.rollout.prompt_index // fold_prompts
    numbers = tuple(fold.unique().tolist())
    parameters = dict(standing.parameters)
    folds = FlatVectors(parameters, len(numbers), "cpu" if offload else None)
    scale = -1.0 / (standing.trainer.max_completion_length * fold_prompts * update.responses_per_prompt)
    for k, number in enumerate(numbers):
        rows = (fold == number).nonzero().squeeze(1)
        learned = rows[update.rollout.advantages[rows] != 0]
        for batch in learned.split(microbatch_size) if len(learned) else ():
            scores = standing.policy.score(update.rollout, batch)
            weights = scale * update.rollout.advantages[batch].unsqueeze(1) * scores.mask
            gradient = torch.autograd.grad(scores.logps, list(parameters.values()), weights.to(scores.logps))
            folds.matrix[k] += folds.flatten(gradient)
        progress(len(rows) * standing.num_ranks)
    num_folds = update.num_prompts // fold_prompts
    mean = standing.reduce(folds.matrix.sum(dim=0).to(standing.device)) / num_folds
    pieces = optimizer_pieces(Layout(parameters), parameters, standing.optimizer.states)
    max_norm = standing.optimizer.max_grad_norm
    parts, clip = _in_parts(pieces, mean, max_norm)
    return Update(mean, clip, parts, parts.total, pieces, folds, numbers, num_folds, max_norm)


def _in_parts(pieces: list[Piece], gradient: Tensor, max_grad_norm: float) -> tuple[UpdateParts, float]:
    """Returns the parts of the step that this flat gradient makes once it is clipped, and its clip coefficient."""
    clip = float(clip_coefficient(torch.linalg.vector_norm(gradient, dtype=torch.float64), max_grad_norm))
    gradient = clip * gradient
    parts = [piece.state.delta(piece.param, gradient[piece.flat]) for piece in pieces]
    return UpdateParts(*(torch.cat(part) for part in zip(*parts, strict=True))), clip


def _refuse_other_losses(standing: Standing) -> None:
    args = standing.trainer.args
    for name, neutral in NEUTRAL_LOSS.items():
        value = getattr(args, name, neutral)
        if value != neutral:
            raise ValueError(
                f"trainer.{name}={value} adds a term to the loss that is not read here: set it to {neutral}"
            )

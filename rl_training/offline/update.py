"""The step that the optimizer would make from the checkpoint with U, in parts, and without each fold of U.

The loss is training's at its first step on fresh responses, where every ratio is 1 (loss.py): Dr-GRPO's gradient is the
mean of

    −(A_i / L) ∂S_i        A_i the advantage, S_i the log-probability of sequence i, L the longest completion allowed

over all sequences of U. Those with A_i = 0 count in the mean and need no backward.

Folds are consecutive prompts, at most MOST_FOLDS of them for any U and any number of processes: a fold's prompts do not
depend on where they were generated. So a fold may be spread over several processes; each keeps the gradients of some of
the folds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.engine.changed_steps import weighed
from rl_training.engine.loss_weights import LossWeights
from rl_training.engine.updates import Piece, optimizer_pieces
from rl_training.mathematics.adamw import UpdateParts, clip_coefficient
from rl_training.mathematics.folds import leave_fold_out, split_prompts
from rl_training.mathematics.vectors import Layout
from rl_training.offline.buffers import UpdateBuffer
from rl_training.offline.loss import loss_weights
from rl_training.offline.phases import Progress, silent
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import Memory

MOST_FOLDS = 16  # a vector over the trainable parameters each


@dataclass(frozen=True)
class Update:
    """δθ and what it is made of: flat vectors over the trainable parameters, the same on every process."""

    gradient: Tensor  # (P,), mean over U, not clipped
    clip: float  # by how much it is shortened
    parts: UpdateParts  # of (P,): momentum, gradient, decay
    delta: Tensor  # (P,), their sum
    pieces: list[Piece]
    folds: Tensor  # (folds kept, P), the mean gradients of those folds that this process keeps
    fold_number: tuple[int, ...]  # which of all folds that is
    fold_prompts: Tensor  # (num_folds,), how many prompts each fold has
    max_grad_norm: float

    @property
    def num_folds(self) -> int:
        """Of all processes."""
        return len(self.fold_prompts)

    def without_fold(self, k: int) -> UpdateParts:
        """Returns the parts, (P,) each, of the step that the other folds alone would make."""
        row = self.folds[k : k + 1].to(self.gradient.device)
        size = self.fold_prompts[self.fold_number[k]].view(1)
        gradient = leave_fold_out(self.gradient, row, size, float(self.fold_prompts.sum()))[0]
        return in_parts(self.pieces, gradient, self.max_grad_norm)[0]


def make_update(restored: RestoredTrainer, update: UpdateBuffer, memory: Memory, progress: Progress = silent) -> Update:
    """Returns the step that U makes."""
    weights = loss_weights(restored, update)
    prompts = torch.arange(update.num_prompts, device=restored.device)
    fold_of_prompt = split_prompts(prompts, MOST_FOLDS)
    fold_prompts = torch.bincount(fold_of_prompt)
    fold = fold_of_prompt[update.rollout.prompt_index]
    kept = tuple(range(restored.rank, len(fold_prompts), restored.num_ranks))
    parameters = dict(restored.parameters)
    layout = Layout(parameters)
    mean = torch.zeros(layout.num_entries, dtype=layout.dtype, device=restored.device)
    folds = mean.new_zeros(len(kept), len(mean), device="cpu" if memory.offload else None)
    for number, size in enumerate(fold_prompts.tolist()):
        rows, out = (fold == number).nonzero().squeeze(1), torch.zeros_like(mean)
        of_fold = restored.reduce(_gradient_sum(restored, update, rows, weights, memory.microbatch_size, out))
        of_fold /= size * update.responses_per_prompt
        mean += (size / update.num_prompts) * of_fold
        if number in kept:
            folds[kept.index(number)] = of_fold
        progress(size * update.responses_per_prompt)
    pieces = optimizer_pieces(layout, parameters, restored.optimizer.states)
    max_norm = restored.optimizer.max_grad_norm
    parts, clip = in_parts(pieces, mean, max_norm)
    return Update(mean, clip, parts, parts.total, pieces, folds, kept, fold_prompts, max_norm)


def _gradient_sum(
    restored: RestoredTrainer,
    update: UpdateBuffer,
    rows: Tensor,
    weights: LossWeights,
    microbatch_size: int,
    out: Tensor,
) -> Tensor:
    """Returns `out`, (P,), with the gradients of the loss of these sequences of this process added to it."""
    parameters = list(restored.parameters.values())
    learned = rows[weighed([weights])[rows]]
    for batch in learned.split(microbatch_size) if len(learned) else ():
        gradients = weights.gradient(restored.policy.score(update.rollout, batch), batch, parameters)
        out += torch.cat([gradient.reshape(-1).to(out.dtype) for gradient in gradients])
    return out


def in_parts(pieces: list[Piece], gradient: Tensor, max_grad_norm: float) -> tuple[UpdateParts, float]:
    """Returns the parts of the step that this flat gradient makes once it is clipped, and its clip coefficient."""
    clip = float(clip_coefficient(torch.linalg.vector_norm(gradient, dtype=torch.float64), max_grad_norm))
    gradient = clip * gradient
    parts = [piece.state.delta(piece.param, gradient[piece.flat]) for piece in pieces]
    return UpdateParts(*(torch.cat(part) for part in zip(*parts, strict=True))), clip

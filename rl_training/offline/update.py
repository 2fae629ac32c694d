"""The step that the optimizer would make from the checkpoint with U, in parts, and without each fold of U.

The loss is training's at its first step on fresh responses, where every ratio is 1: Dr-GRPO's gradient is the mean of

    −(A_i / L) ∂S_i        A_i the advantage, S_i the log-probability of sequence i, L the longest completion allowed

over all sequences of U. Those with A_i = 0 count in the mean and need no backward. If the run trains with an entropy
bonus or an entropy quantile, the interventions of these names change these weights (interventions/reweighting.py). With
both, as in TRL, the bonus is on the quantile's tokens.

Folds are consecutive prompts, at most MOST_FOLDS of them for any U and any number of processes: a fold's prompts do not
depend on where they were generated. So a fold may be spread over several processes; each keeps the gradients of some of
the folds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.batch import Rollout, take_rows
from rl_training.engine.changed_steps import weighed
from rl_training.engine.loss_weights import LossWeights, gradient_of
from rl_training.engine.updates import (
    FoldMeans,
    OptimizerPieces,
    Piece,
    StepsWithoutFolds,
    fold_means,
)
from rl_training.hosts.trl.batches import loss_settings
from rl_training.interventions.loss import LossInputs, microbatch_inputs
from rl_training.interventions.reweighting import bonus, highest_entropies
from rl_training.mathematics.adamw import UpdateParts, clip_coefficient
from rl_training.mathematics.folds import split_prompts
from rl_training.mathematics.jackknife import unchanged
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import Layout
from rl_training.offline.buffers import UpdateBuffer
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
    pieces: OptimizerPieces
    without: StepsWithoutFolds  # for the folds that this process keeps
    fold_number: tuple[int, ...]  # which of all folds these are
    fold_prompts: Tensor  # (num_folds,), how many prompts each of all folds has

    @property
    def num_folds(self) -> int:
        """Of all processes."""
        return len(self.fold_prompts)

    def in_pieces(self) -> Iterator[tuple[Piece, UpdateParts]]:
        """Yields each piece and the parts of the step in it, (n,)."""
        for piece in self.pieces:
            yield piece, UpdateParts(*(part[piece.flat] for part in self.parts))


def make_update(restored: RestoredTrainer, update: UpdateBuffer, memory: Memory, progress: Progress = silent) -> Update:
    """Returns the step that U makes."""
    rollout, group = update.rollout, update.responses_per_prompt
    weights = _loss_weights(restored, rollout)
    learned = weighed([weights])
    fold_of_prompt = split_prompts(torch.arange(update.num_prompts, device=restored.device), MOST_FOLDS)
    fold, fold_prompts = fold_of_prompt[rollout.prompt_index], torch.bincount(fold_of_prompt)
    kept = tuple(range(restored.rank, len(fold_prompts), restored.num_ranks))
    parameters, layout = list(restored.parameters.values()), Layout(restored.parameters)
    mean = torch.zeros(layout.num_entries, dtype=layout.dtype, device=restored.device)
    folds = mean.new_zeros(len(kept), len(mean), device="cpu" if memory.offload else None)
    for number, size in enumerate(fold_prompts.tolist()):
        gradient_of_fold, rows = torch.zeros_like(mean), (learned & (fold == number)).nonzero().squeeze(1)
        for batch in rows.split(memory.microbatch_size) if len(rows) else ():
            fresh = restored.policy.score(rollout, batch)
            own = weights.of_rows(batch, fresh.logps.shape[1], rollout.num_sequences)
            gradient = gradient_of(fresh, own.logps, own.entropies, parameters)
            gradient_of_fold += torch.cat(layout.vector(gradient))
        gradient_of_fold = restored.reduce(gradient_of_fold)
        gradient_of_fold /= size * group
        mean += (size / update.num_prompts) * gradient_of_fold
        if number in kept:
            folds[kept.index(number)] = gradient_of_fold
        progress(size * group)
    pieces = OptimizerPieces(layout, restored.parameters, restored.optimizer.states)
    max_norm = restored.optimizer.max_grad_norm
    clip = float(clip_coefficient(torch.linalg.vector_norm(mean, dtype=torch.float64), max_norm))
    by_piece = [piece.delta(clip * mean[piece.flat]) for piece in pieces]
    parts = UpdateParts(*(torch.cat(part) for part in zip(*by_piece, strict=True)))
    sizes, num_prompts = fold_prompts[list(kept)], float(fold_prompts.sum())
    vectors = layout.split(mean), layout.split(folds)
    if len(fold_prompts) > 1:
        kept_means = fold_means(*vectors, sizes.double(), num_prompts)
    else:  # that cannot be left out
        unknown = torch.full((len(kept), 1), math.nan, device=restored.device)
        kept_means = FoldMeans(*vectors, sizes, unknown, unknown)
    without = StepsWithoutFolds(pieces, kept_means, max_norm, unchanged)
    return Update(mean, clip, parts, parts.total, pieces, without, kept, fold_prompts)


# --- U's loss as training has it --------------------------------------------------------------------------------------


def _loss_weights(restored: RestoredTrainer, rollout: Rollout) -> LossWeights:
    """Returns the weights of this process's part of U; those of entropies by microbatches of training, as in TRL."""
    trainer, count = restored.trainer, rollout.num_sequences
    unit = 1.0 / (count * trainer.max_completion_length)
    logps = -unit * rollout.advantages.unsqueeze(1) * rollout.completion_mask
    if trainer.args.entropy_coef == 0.0 and trainer.args.top_entropy_quantile == 1.0:
        return LossWeights(logps, None)  # which no score changes
    scores, settings, parts = restored.policy.score_rollout(rollout), loss_settings(trainer), []
    size = math.gcd(count, trainer.args.per_device_train_batch_size)
    for rows in torch.arange(count, device=restored.device).split(size):
        own = Scores(scores.logps[rows], scores.entropies[rows], scores.mask[rows])
        part = microbatch_inputs(take_rows(rollout, rows), own, LossWeights(logps[rows], None), settings)
        parts.append(_with_terms(replace(part, microbatches=count / size), trainer.args))
    entropies = [part.entropies for part in parts if part.entropies is not None]
    return LossWeights(torch.cat([part.logps for part in parts]), torch.cat(entropies) if entropies else None)


def _with_terms(part: LossInputs, args: Any) -> LossWeights:
    """Returns the weights of a microbatch with the run's quantile of entropies and its bonus, on the same tokens."""
    weights = part.weights
    if args.top_entropy_quantile != 1.0:
        kept = highest_entropies(part, args.top_entropy_quantile)
        weights = LossWeights(weights.logps * kept, weights.entropies)
        part = replace(part, scores=replace(part.scores, mask=kept.long()))
    if args.entropy_coef != 0.0:
        weights = bonus(replace(part, weights=weights), args.entropy_coef)
    return weights

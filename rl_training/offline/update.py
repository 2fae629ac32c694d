"""The step that the optimizer would make on U from the checkpoint: its parts, and the step without each fold of U.

The loss is training's on fresh responses, where every policy ratio is 1. Dr-GRPO's gradient is the mean of

    −(A_i / L) ∂S_i        A_i the advantage, S_i the log-probability of sequence i, L the longest completion allowed

over all sequences of U. Sequences with A_i = 0 count in the mean but need no backward. The weights of log-probabilities
and entropies are the derivatives of TRL's own loss, including entropy bonus and quantile.

A fold is a run of consecutive prompts. There are at most MAX_FOLDS, and neither their number nor their prompts depend
on the number of processes. So a fold's prompts may be on several processes; each process keeps the gradients of some
of the folds.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.gradients.folds import folds_of_prompts, plan_prompt_folds
from rl_training.gradients.loss_weights import LossWeights, gradient_of, rows_with_weight
from rl_training.hosts.trl.compatibility import wrap
from rl_training.hosts.trl.members import FORWARD_PASS
from rl_training.hosts.trl.trainer import GRPOTrainer
from rl_training.hosts.trl.versions import NUM_SCORES
from rl_training.offline.buffers import UpdateBuffer
from rl_training.offline.phases import Progress, silent
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import Memory
from rl_training.optim.adamw import clip_coefficient
from rl_training.optim.formula import UpdateParts
from rl_training.optim.leave_one_out import LeaveOneOutUpdates, fold_means
from rl_training.optim.updates import OptimizerPiece, OptimizerPieces
from rl_training.parallel.rows import Rows
from rl_training.parallel.vectors import Layout
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.statistics.jackknife import identity

MAX_FOLDS = 16  # each takes a vector over the trainable parameters
OF_THE_LOSS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")  # inputs of TRL's loss


@dataclass(frozen=True)
class Update:
    """δθ and its parts: flat vectors over the trainable parameters, the same on every process."""

    gradient: Tensor  # (P,), mean over U, before clipping
    clip: float  # clipping factor of the gradient
    parts: UpdateParts  # (P,) each: momentum, gradient, decay
    delta: Tensor  # (P,), their sum δθ
    pieces: OptimizerPieces
    without: LeaveOneOutUpdates  # the steps without each fold that this process keeps
    local_folds: tuple[int, ...]  # the numbers of these folds
    fold_prompts: Tensor  # (num_folds,), number of prompts in every fold, of all processes
    scores: Scores  # of this process's part of U, at the checkpoint

    @property
    def num_folds(self) -> int:
        """The number of folds over all processes."""
        return len(self.fold_prompts)

    def in_pieces(self) -> Iterator[tuple[OptimizerPiece, UpdateParts]]:
        """Yield each piece with its entries of the step's parts, (n,) each."""
        for piece in self.pieces:
            yield piece, UpdateParts(*(part[piece.flat] for part in self.parts))


def make_update(restored: RestoredTrainer, update: UpdateBuffer, memory: Memory, progress: Progress = silent) -> Update:
    """Compute the optimizer's step on U. Collective."""
    rollout = update.rollout
    group = update.responses_per_prompt
    scores = restored.policy.score_rollout(rollout)
    weights = _loss_weights(restored, rollout, scores)
    has_weight = rows_with_weight([weights])
    folds_of_u = plan_prompt_folds(update.num_prompts, num_folds=MAX_FOLDS)
    fold_of_prompt = folds_of_prompts(torch.arange(update.num_prompts, device=restored.device), folds_of_u)
    fold = fold_of_prompt[rollout.prompt_index]
    fold_prompts = torch.bincount(fold_of_prompt)
    local_folds = tuple(range(restored.rank, len(fold_prompts), restored.num_ranks))
    parameters = list(restored.parameters.values())
    layout = Layout(restored.parameters)
    mean = torch.zeros(layout.num_entries, dtype=layout.dtype, device=restored.device)
    folds = mean.new_zeros(len(local_folds), len(mean), device="cpu" if memory.offload else None)
    for number, size in enumerate(fold_prompts.tolist()):
        gradient_of_fold = torch.zeros_like(mean)
        rows = (has_weight & (fold == number)).nonzero().squeeze(1)
        for batch in rows.split(memory.microbatch_size) if len(rows) else ():
            fresh = restored.policy.score(rollout, batch)
            row_weights = weights.of_rows(batch, fresh.logps.shape[1])
            gradient = gradient_of(fresh, row_weights.logps, row_weights.entropies, parameters)
            gradient_of_fold += torch.cat(layout.vector(gradient))
        gradient_of_fold = restored.reduce(gradient_of_fold)
        gradient_of_fold /= size * group
        mean += (size / update.num_prompts) * gradient_of_fold
        if number in local_folds:
            folds[local_folds.index(number)] = gradient_of_fold
        progress(size * group)
    pieces = OptimizerPieces(layout, restored.parameters, restored.optimizer.states)
    max_norm = restored.optimizer.max_grad_norm
    clip = float(clip_coefficient(torch.linalg.vector_norm(mean, dtype=torch.float64), max_norm))
    by_piece = [piece.delta(clip * mean[piece.flat]) for piece in pieces]
    parts = UpdateParts(*(torch.cat(part) for part in zip(*by_piece, strict=True)))
    sizes = fold_prompts[list(local_folds)]
    num_prompts = float(fold_prompts.sum())
    local_rows = Rows.holding(layout, layout.split(folds))
    local_fold_means = fold_means(layout.split(mean), local_rows, sizes.double(), num_prompts)
    without = LeaveOneOutUpdates(pieces, local_fold_means, max_norm, identity)
    return Update(mean, clip, parts, parts.total, pieces, without, local_folds, fold_prompts, scores)


# --- training's loss on U ---------------------------------------------------------------------------------------------


def _loss_weights(restored: RestoredTrainer, rollout: Rollout, scores: Scores) -> LossWeights:
    """Return the derivatives of training's own loss by the scores of this process's part of U, by microbatch.

    Summed over U and divided by U's number of sequences, they give the gradient of the loss. Collective.
    """
    trainer = restored.trainer
    tables = []
    size = math.gcd(rollout.num_sequences, trainer.args.per_device_train_batch_size)
    lengths = rollout.completion_mask.sum(dim=1).double()
    num_tokens, num_sequences = restored.reduce(torch.stack([lengths.sum(), torch.ones_like(lengths).sum()])).tolist()
    # The tokens of one generation whose sequences have U's mean length. A loss that TRL divides by the number of tokens
    # in a generation is then divided by each microbatch's share of them.
    tokens = size * num_tokens / num_sequences * restored.num_ranks * trainer.args.steps_per_generation
    for rows in torch.arange(rollout.num_sequences, device=restored.device).split(size):
        leaves = [values[rows].requires_grad_() for values in (scores.logps, scores.entropies)]
        inputs = {name: getattr(rollout, name)[rows] for name in OF_THE_LOSS}
        inputs["importance_sampling_ratio"] = torch.ones_like(leaves[0])  # read with vLLM; U is from this policy
        inputs["num_items_in_batch"] = scores.logps.new_tensor(tokens)
        loss = _trl_loss(trainer, inputs, leaves)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        tables.append(size * torch.stack(gradients))
    return LossWeights.of_stacked(torch.cat(tables, dim=1))


def _trl_loss(trainer: GRPOTrainer, inputs: dict[str, Tensor], scores: Sequence[Tensor]) -> Tensor:
    """Return TRL's loss of a microbatch with given scores: log-probabilities and entropies, (B, T) each."""
    with contextlib.ExitStack() as undo:
        wrap(trainer, FORWARD_PASS, lambda *args, **kwargs: (*scores, scores[0].new_zeros(()))[:NUM_SCORES], undo)
        loss: Tensor = trainer.compute_loss(trainer.model, inputs)
    return loss

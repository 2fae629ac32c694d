"""The step that the optimizer would make on U from the checkpoint: its parts, and the step without each fold of U.

The loss is training's on fresh responses, where every policy ratio is 1. Dr-GRPO's gradient is the mean of

    −(A_i / L) ∂S_i        A_i the advantage, S_i the log-probability of sequence i, L the longest completion allowed

over all sequences of U. Sequences with A_i = 0 count in the mean but need no backward. The weights of log-probabilities
and entropies are the derivatives of TRL's own loss, including entropy bonus and quantile.

A fold is a run of consecutive prompts. There are at most MAX_FOLDS, and neither their number nor their prompts depend
on the number of processes, so a fold's prompts may be on several of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.hosts.trl.members import FORWARD_PASS
from rl_training.hosts.trl.trainer import GRPOTrainer
from rl_training.hosts.trl.versions import NUM_SCORES
from rl_training.hosts.trl.wrapping import wrap
from rl_training.offline.buffers import UpdateBuffer
from rl_training.offline.phases import Progress, silent
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import MemorySettings
from rl_training.optim.leave_one_out import FoldMeans, LeaveOneOutUpdates
from rl_training.optim.updates import OptimizerPieces, StepUpdate, clip_factors, compute_update
from rl_training.parallel.fold_vectors import FoldVectors, Receiver
from rl_training.parallel.vectors import Vector, dot
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.step.batch import Batch
from rl_training.step.folds import FoldSource, folds_of_prompts, plan_prompt_folds
from rl_training.step.loss_weights import LossWeights
from rl_training.step.passes import Weightings

MAX_FOLDS = 16  # each takes a vector over the trainable parameters
OF_THE_LOSS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")  # inputs of TRL's loss


@dataclass(frozen=True)
class Update:
    """The optimizer's step on U. Vectors hold this process's entries."""

    batch: Batch  # this process's part of U, scored at the checkpoint
    gradient: Vector  # mean over U, before clipping
    delta: Vector  # δθ
    without: LeaveOneOutUpdates  # the steps without each fold

    @property
    def whole(self) -> StepUpdate:
        """δθ piece by piece, and the clipping factor."""
        return self.without.step_update


def make_update(
    restored: RestoredTrainer, update: UpdateBuffer, memory: MemorySettings, progress: Progress = silent
) -> Update:
    """Compute the optimizer's step on U. Collective."""
    layout = restored.layout
    batch = _batch_of(restored, update, memory.microbatch_size)
    by_fold = FoldVectors(layout, batch.num_folds, device="cpu" if memory.offload else None)

    def receiver_of(_: int, folds: range) -> Receiver:
        progress(int(batch.fold_sizes[folds.start]))
        return by_fold.receiver(folds)

    shares = (1.0 / batch.fold_sizes).to(batch.fold.device)[batch.fold].unsqueeze(1)
    restored.passes.send_gradients(batch, Weightings([batch.loss_weights], shares), receiver_of)
    by_fold.complete()
    gradient = by_fold.sum(batch.fold_sizes / batch.num_sequences)
    max_norm = restored.optimizer.max_grad_norm
    pieces = OptimizerPieces(layout, restored.shard.weights(), restored.optimizer.states)
    folds = FoldMeans.of(gradient, by_fold, batch.fold_sizes)
    whole = StepUpdate(pieces, gradient, clip=float(clip_factors(restored.reduce(dot(gradient, gradient)), max_norm)))
    without = LeaveOneOutUpdates(pieces, folds, max_norm, restored.passes.ranks, whole)
    return Update(batch, gradient, compute_update(layout, whole), without)


def _batch_of(restored: RestoredTrainer, update: UpdateBuffer, microbatch_size: int) -> Batch:
    """Score U, and cut it into folds. Collective."""
    rollout = update.rollout
    scores = restored.policy.score_rollout(rollout)
    fold_groups = plan_prompt_folds(update.num_prompts, num_folds=MAX_FOLDS)
    fold_of_prompt = folds_of_prompts(torch.arange(update.num_prompts), fold_groups)
    rows = range(rollout.num_sequences)
    return Batch(
        rollout=rollout,
        scores=scores,
        loss_weights=_loss_weights(restored, rollout, scores),
        microbatch_rows=tuple(rows[first : first + microbatch_size] for first in rows[::microbatch_size]),
        fold_groups=fold_groups,
        fold=fold_of_prompt.to(restored.device)[rollout.prompt_index],
        fold_sizes=update.responses_per_prompt * fold_of_prompt.bincount().double(),
        responses_per_prompt=update.responses_per_prompt,
        fold_source=FoldSource.RECOMPUTED,
    )


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

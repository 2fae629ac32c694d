"""Steps made by hand, for tests that need no trainer: one on-policy step of a loop that supports every request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.engine.context import StepContext
from rl_training.engine.fold_advice import ONE_FOLD
from rl_training.entropy.attribution import Attribution
from rl_training.entropy.data import EntropySettings
from rl_training.entropy.prediction import EntropyPredictor
from rl_training.entropy.previous_update import PreviousUpdate
from rl_training.hosts.plain.measured_loop import FIXES
from rl_training.optim.adamw import AdamWState
from rl_training.optim.leave_one_out import EVERY_FOLD, FoldMeans
from rl_training.optim.sgd import SGDState
from rl_training.optim.state import OptimizerView
from rl_training.optim.updates import OptimizerPieces
from rl_training.parallel.fold_vectors import FoldVectors
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sharding import Shard
from rl_training.parallel.vectors import Layout, Vector
from rl_training.policy.policy import Policy
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.step.batch import Batch
from rl_training.step.data import Gradients, StepData
from rl_training.step.fold_reduction import FoldReduction
from rl_training.step.folds import FoldGroup, FoldSource, ranges_of
from rl_training.step.loss_weights import LossWeights
from rl_training.step.needs import Need
from rl_training.step.passes import Passes
from rl_training.step.reasons import Reasons

ALONE = Ranks(1, lambda tensor: tensor)
PLAIN_SGD = SGDState(None, lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False)


def draw(*shape: int) -> Tensor:
    """Draw standard normal numbers, fp64."""
    return torch.randn(*shape, dtype=torch.float64)


def run_each(batches: Sequence[Tensor], run: Callable[[Tensor], Any]) -> list[Any]:
    """Run passes as a policy does whose weights are whole: one for each batch."""
    return [run(rows) for rows in batches]


def drawn_adamw(shape: tuple[int, ...], weight_decay: float, step: int) -> AdamWState:
    """Return an AdamW state with random moments."""
    return AdamWState(draw(*shape), draw(*shape).square(), step, 1e-2, (0.9, 0.99), 1e-8, weight_decay)


def shard_of(parameters: Mapping[str, Tensor]) -> Shard:
    """Return the shard of a rank that holds all of these parameters."""
    held = nn.ParameterDict(parameters)
    shard = Shard(held, torch.optim.SGD(held.parameters()), None)
    shard.num_ranks, shard.rank = 1, 0  # also where several processes train
    return shard


def scored(rollout: Any, scores: Scores, loss_weights: Any = None) -> Batch:
    """Return a batch that has only its sequences, scores and loss weights."""
    nothing = torch.zeros(0)
    return Batch(
        rollout, scores, loss_weights, (), (), nothing, nothing, responses_per_prompt=0, fold_source=FoldSource.CAUGHT
    )


def fold_vectors_of(layout: Layout, vectors: Vector) -> FoldVectors:
    """Return vectors by fold with these entries, (K, n) per bucket."""
    by_fold = FoldVectors(layout, len(vectors[0]), vectors[0].dtype)
    by_fold.replace(range(len(by_fold)), vectors)
    return by_fold


def means_without_folds(folds: Tensor, sizes: Tensor) -> Tensor:
    """Return for each fold the mean over all other folds, as leave-one-out updates use it.

    Args:
        folds: Mean of each fold, (K, …).
        sizes: n_k, (K,), fp64.

    Returns:
        (K, …), the shape of `folds`.
    """
    vectors = folds.flatten(1)
    mean = sizes.to(vectors) @ vectors / sizes.sum()
    pieces = OptimizerPieces(Layout.of({"all": mean}), {"all": mean}, {"all": PLAIN_SGD})
    means = FoldMeans.of([mean], fold_vectors_of(Layout.of({"all": mean}), [vectors]), sizes)
    return torch.cat([means.without(EVERY_FOLD, piece) for piece in pieces], dim=1).view_as(folds)


def step_of(
    number: int,
    rollout: Rollout,
    scores: Scores,
    loss_weights: Tensor,
    microbatches: int,
    parameters: Mapping[str, nn.Parameter],
    mean: Mapping[str, Tensor],
    policy: Policy,
    *,
    states: Any = None,
    by_fold: Vector | None = None,
    sq_norms: Tensor | None = None,
    entropy: EntropySettings | None = None,
    ranks: Ranks = ALONE,
) -> StepContext:
    """Return what a probe sees of a step with equal microbatches, each a fold.

    Args:
        microbatches: Number of microbatches.
        parameters: The trained parameters in their own shapes; the step keeps them flat.
        mean: The mean gradient by parameter, in the parameters' shapes.
        by_fold: The gradient of each fold.
        sq_norms: The squared gradient norm of each fold.
        entropy: With these settings, the context also has the entropy prediction.
    """
    size = rollout.num_sequences // microbatches
    microbatch_rows = ranges_of([size] * microbatches)
    fold = rollout.prompt_index.new_tensor(range(microbatches)).repeat_interleave(size)
    batch = Batch(
        rollout=rollout,
        scores=scores,
        loss_weights=LossWeights(loss_weights, None),
        microbatch_rows=microbatch_rows,
        fold_groups=[FoldGroup(range(k, k + 1), (0,) * ranks.count, (rows,)) for k, rows in enumerate(microbatch_rows)],
        fold=fold,
        fold_sizes=torch.full((microbatches,), float(size * ranks.count), dtype=torch.float64),
        responses_per_prompt=int((rollout.prompt_index == rollout.prompt_index[0]).sum()),
        fold_source=FoldSource.CAUGHT,
    )
    shard = shard_of(parameters)
    step = StepData(
        number=number,
        batch=batch,
        weights=shard.weights(),
        gradients=Gradients(
            {name: gradient.flatten() for name, gradient in mean.items()},
            shard.layout,
            None if by_fold is None else fold_vectors_of(shard.layout, by_fold),
            sq_norms=sq_norms,
        ),
        optimizer=OptimizerView(states, math.inf),
        reasons=Reasons(no_folds=ONE_FOLD.formatted(more="more") if microbatches < 2 else None),
        fixes=FIXES,
    )
    passes = Passes(policy, ranks, FoldReduction(shard))
    if entropy is None:
        return StepContext(step, passes)
    predictor = EntropyPredictor(entropy, Attribution(shard.layout.names), passes)
    previous = PreviousUpdate(shard)
    prediction, step_update = predictor.predict(step, Need.ENTROPY_CHANGE, previous)
    return StepContext(step, passes, previous.advance(step, prediction, step_update))

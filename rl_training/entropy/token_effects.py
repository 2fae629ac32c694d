"""The part of ΔH that comes from each single token of the step's fresh gradient, in 2 K forward passes for all of them.

The part of a class of tokens (probes/token_classes.py) is Σ_k n_k X_k · a_(−k) ∘ g_(−k) / Σ T, and g_(−k) is a sum over
the tokens of all other folds. For fold k, a token's summand is thus a directional derivative of its own scores along

    v_k = a_(−k) ∘ X_k

by central differences between θ ± ε v_k. ε moves log-probabilities by MEAN_MOVE on average: far above the rounding of
scores, and small enough for a straight line. One direction serves all tokens, whereas gradients would take one backward
per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rl_training.entropy.data import EntropyPrediction
from rl_training.entropy.paired_effects import updates_and_entropy_gradients
from rl_training.entropy.per_decision import slopes
from rl_training.optim.leave_one_out import LeaveOneOutUpdates
from rl_training.parallel.fold_vectors import FoldVectors
from rl_training.parallel.sums import square_norm
from rl_training.parallel.vectors import Layout, Vector
from rl_training.policy.rollout import take_rows
from rl_training.policy.scores import Scores
from rl_training.step.batch import Batch
from rl_training.step.loss_weights import rows_with_weight
from rl_training.step.passes import Passes

MEAN_MOVE = 1e-3  # nats, by which a shift should move log-probabilities on average
RANGE = 10.0  # a shift that is off by more than this factor is made again
ATTEMPTS = 4


def iter_token_products(batch: Batch, prediction: EntropyPrediction, passes: Passes) -> Iterator[Tensor]:
    """Yield for each fold k the summands of X_k · a_(−k) ∘ g_(−k) by token, (B, T) fp64; 0 in fold k. Collective.

    Only valid if `paired_effects_reason` returns None.
    """
    updates, x = updates_and_entropy_gradients(prediction)
    weights = batch.loss_weights
    sizes = batch.fold_sizes
    has_weight = rows_with_weight([weights])
    length = 0.1 if prediction.update is None else 0.1 * _length(prediction.update, passes)  # of the shift
    for k in range(batch.num_folds):
        rows = ((batch.fold != k) & has_weight).nonzero().squeeze(1)
        direction = _direction(passes.layout, updates, x, k)
        products = torch.zeros_like(weights.logps, dtype=torch.float64)
        norm = _length(direction, passes)
        if norm > 0 and length > 0:
            mask = batch.scores.mask[rows] != 0
            (logps, entropies), length = _slopes(batch, passes, rows, direction, norm, length)
            # Loss weights are those of a mean over a rank's sequences, and g_(−k) is a mean over the other folds.
            share = batch.num_sequences / passes.ranks.count / (sizes.sum() - sizes[k])
            parts = weights.logps[rows].double() * logps
            if weights.entropies is not None:
                parts += weights.entropies[rows].double() * entropies
            products[rows] = float(share) * parts.where(mask, 0.0)
        yield products


def _slopes(
    batch: Batch, passes: Passes, rows: Tensor, direction: Vector, norm: float, length: float
) -> tuple[tuple[Tensor, Tensor], float]:
    """Return the derivatives of the scores of some rows along `direction`, and a length for the next shift. Collective.

    They are nan if no shift moves the log-probabilities by about MEAN_MOVE.

    Args:
        norm: The norm of `direction`.
        length: The length of the first shift that is tried.
    """
    mask = batch.scores.mask[rows] != 0
    for _ in range(ATTEMPTS):
        ahead, behind = _shifted_scores(batch, passes, rows, direction, length / norm)
        moved = 0.5 * (ahead.logps.double() - behind.logps.double()).where(mask, 0.0).abs().sum()
        total, count = passes.ranks.reduce(torch.stack([moved, mask.sum().double()])).tolist()
        mean = total / max(count, 1.0)
        if not 0.0 < mean < math.inf or MEAN_MOVE / RANGE < mean < MEAN_MOVE * RANGE:
            return slopes(ahead, behind, length / norm), length
        length *= MEAN_MOVE / mean
    unknown = torch.full(mask.shape, torch.nan, dtype=torch.float64, device=mask.device)
    return (unknown, unknown), length


def _direction(layout: Layout, updates: LeaveOneOutUpdates, x: FoldVectors, k: int) -> Vector:
    """Return v_k, this rank's entries."""
    vector = layout.zeros()
    clip = float(updates.clips[k])
    factor = float(x.factors[k])
    for piece in updates.pieces:
        slope = piece.gradient_factor(updates.clipped.without(k, piece))
        piece.of(vector).copy_(slope * x.of(piece.bucket, piece.columns, k)).mul_(clip * factor)
    return vector


def _length(vector: Vector, passes: Passes) -> float:
    """Return the vector's norm over all ranks. Collective."""
    return float(passes.ranks.reduce(torch.stack([square_norm(part) for part in vector]).sum()).sqrt())


def _shifted_scores(
    batch: Batch, passes: Passes, rows: Tensor, direction: Vector, size: float
) -> tuple[Scores, Scores]:
    """Return the scores of some rows with the weights θ + size · direction and θ − size · direction. Collective."""
    policy = passes.policy
    shifts = passes.layout.by_name(direction)
    current = policy.shard.copy_local_weights()
    rollout = take_rows(batch.rollout, rows)
    scores = []
    for sign in (1.0, -1.0):
        with policy.with_weights({name: weight + sign * size * shifts[name] for name, weight in current.items()}):
            scores.append(policy.score_rollout(rollout))
    ahead, behind = scores
    return ahead, behind

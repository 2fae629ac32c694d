"""First-order prediction of the entropy change: δH₁ = X̄·δθ, with X̄ = ∂H estimated from E and the step δθ from U.

E and U are independent, so the product is unbiased without cross-fitting. Its variance is the sum of two jackknife
variances: one leaves out a block of E's prompts at a time, the other a fold of U's prompts:

    se² = se²_E + se²_U         two independent samples

Leaving out a block keeps the mean entropy H_tok inside X and its sequences' baselines fixed. Leaving out a fold
recomputes the optimizer's step, clipping included.

`compare_preconditioners` shows how much of δH₁ is due to the optimizer: it repeats the prediction with the same X̄ and U
under other preconditioners. With g the clipped gradient of U, m ← β1 m + (1−β1) g, and v̂ and P = 1/(√v̂ + ε) those of
this step, the directions are

    adam                the real step, weight decay included
    momentum-free adam  −P g                     the step that this batch alone would make
    rms-only            −m / rms(√v̂)             one scale per weight tensor
    identity            −m                       no preconditioner
    sgd                 −g                       neither preconditioner nor momentum

Each direction is scaled to the real step's norm ‖δθ‖, and also to its first-order gain in reward, −g·δθ. Momentum can
make that gain negative; matching it then has no meaning, and the number is nan. All numbers of a zero direction are
nan: −g is zero if no response of U has an advantage.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.entropy.attribution import Attribution
from rl_training.offline.buffers import SampledBuffer, UpdateBuffer
from rl_training.offline.phases import Progress, silent
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.update import Update
from rl_training.optim.adamw import AdamWState
from rl_training.optim.formula import CAUSES
from rl_training.optim.updates import OptimizerPiece
from rl_training.parallel.vectors import Vector, dot
from rl_training.probes.advantage_covariance import covariance_terms, minus_covariance
from rl_training.probes.fresh_sample import TARGETS, weights_of_buffer, without_blocks
from rl_training.statistics.jackknife import MIN_UNITS_OFFLINE, Replicates
from rl_training.step.passes import Weightings

WHOLE = "whole"
TOKEN = 0
SEQUENCE = 1


@dataclass(frozen=True)
class FirstOrder:
    """δH₁ per token and per sequence, in nats, by label, such as "whole", "part/momentum", "layer/0" or "kind/mlp"."""

    labels: tuple[str, ...]
    over_evaluation: Replicates  # (labels, 2), leaving out blocks of E
    over_update: Replicates  # (labels, 2), leaving out folds of U
    direction: tuple[Vector, Vector]  # this process's entries of X̄, per token and per sequence

    @property
    def value(self) -> Tensor:
        return self.over_evaluation.value

    @property
    def stderr(self) -> Tensor:
        """Standard error from both buffers, (labels, 2); nan if E has too few blocks or U too few folds."""
        if min(len(self.over_evaluation.without), len(self.over_update.without)) < MIN_UNITS_OFFLINE:
            return torch.full_like(self.value, math.nan)
        return (self.over_evaluation.stderr.square() + self.over_update.stderr.square()).sqrt()


def predict(
    restored: RestoredTrainer, evaluation: SampledBuffer, update: Update, microbatch_size: int,
    progress: Progress = silent,
) -> FirstOrder:  # fmt: skip
    """Predict δH₁ of the step `update`, split by label, with errors. Collective.

    Every microbatch of E takes one forward and two backwards.
    """
    splits = Attribution(restored.layout.names)
    blocks = evaluation.blocks(microbatch_size)
    block = blocks.number[evaluation.score_rows]
    rows_of_blocks = [(block == number).nonzero().squeeze(1) for number in block.unique()]
    passes = [part for rows in rows_of_blocks for part in rows.split(microbatch_size)]
    shares = torch.full((len(block), 1), 1.0 / evaluation.num_sequences, device=block.device)
    direction = restored.layout.zeros(), restored.layout.zeros()
    products = list[Tensor]()  # of each pass, (ranks, labels, 2)
    sizes = iter([len(rows) for rows in passes])

    def multiply(gradients: list[Vector]) -> None:
        products.append(_products(splits, update, update.whole.gradient, gradients))
        for total, of_ranks in zip(direction, gradients, strict=True):
            for bucket, vectors in zip(total, of_ranks, strict=True):
                bucket += vectors.sum(dim=0)
        progress(next(sizes, 0) * restored.num_ranks)

    weightings = Weightings(weights_of_buffer(evaluation, TARGETS), shares)
    with restored.policy.measuring():
        restored.passes.gradients_by_rank(evaluation.rollout, passes, weightings, multiply)
    by_pass = restored.reduce(torch.stack(products))[: len(passes), restored.rank]
    by_block = by_pass.new_zeros(blocks.count, *by_pass.shape[1:])
    by_block.index_add_(0, torch.stack([block[rows[0]] for rows in passes]), by_pass)
    over_evaluation = without_blocks(restored.reduce(by_block), evaluation.scores.mask, blocks)
    return FirstOrder((WHOLE, *splits.labels), over_evaluation, without_folds(restored, update, direction), direction)


def without_folds(restored: RestoredTrainer, update: Update, direction: Sequence[Vector]) -> Replicates:
    """Return X̄·δθ by label, (labels, 2), with its value for the step without each fold of U. Collective."""
    splits = Attribution(restored.layout.names)
    clipped = update.without.clipped
    whole = _products(splits, update, update.whole.gradient, direction)
    without = [
        _products(splits, update, functools.partial(clipped.without, fold), direction)
        for fold in range(update.batch.num_folds)
    ]
    value, *others = restored.reduce(torch.stack([whole, *without]))
    return Replicates(value, torch.stack(others))


def _products(
    splits: Attribution, update: Update, gradient_of: Callable[[OptimizerPiece], Tensor], directions: Sequence[Vector]
) -> Tensor:
    """Return the products of some X with the step that a gradient makes, summed over this process's entries.

    Args:
        splits: The labels.
        update: The step whose weights and optimizer states are used.
        gradient_of: Returns the clipped gradient in a piece, (n,).
        directions: The X, (…, n) per bucket each.

    Returns:
        (…, labels, directions) fp64: the whole step first, then its splits.
    """
    num_parameters = update.whole.pieces.spans[-1].parameter_indices.stop
    shape = (*directions[0][0].shape[:-1], len(CAUSES), num_parameters, len(directions))
    by_both = directions[0][0].new_zeros(shape, dtype=torch.float64)
    for piece in update.whole.pieces:
        gradient = gradient_of(piece)
        for index, x in enumerate(directions):
            by_both[..., piece.parameter_indices, index] += piece.effects(gradient, piece.of(x))
    by_cause = by_both.sum(dim=-2)
    by_label = splits.sum(torch.cat([by_cause, by_both.sum(dim=-3)], dim=-2))
    return torch.cat([by_cause.sum(dim=-2, keepdim=True), by_label], dim=-2)


def covariance_of(restored: RestoredTrainer, buffer: UpdateBuffer, update: Update) -> Replicates:
    """Return −Cov(log π, A) over all of U, (2,) per token and per sequence, with its value without each prompt.

    This is the entropy predictor of Cui et al. Its scale is unknown: see probes/advantage_covariance.py. Collective.
    """
    terms = covariance_terms(update.batch.scores, buffer.rollout.advantages)
    by_prompt = terms.new_zeros(buffer.num_prompts, *terms.shape[1:])
    by_prompt = restored.reduce(by_prompt.index_add_(0, buffer.rollout.prompt_index, terms))
    total = by_prompt.sum(dim=0)
    return Replicates(minus_covariance(total), minus_covariance(total - by_prompt))


# --- other preconditioners --------------------------------------------------------------------------------------------


def compare_preconditioners(
    restored: RestoredTrainer, update: Update, direction: Sequence[Vector]
) -> list[dict[str, Any]]:
    """Predict δH₁ under each preconditioner, in nats. See the module docstring. Collective.

    Args:
        restored: The restored trainer.
        update: The step.
        direction: X̄ per token and per sequence.

    Returns:
        One row per direction; no rows if the optimizer is not Adam:

            delta_h1, delta_h1_sequence   at the real step's norm; nan if the direction is 0
            delta_h1_same_gain            per token, at the real step's gain in reward; nan unless both gains are > 0
            cosine                        between the direction and the real step; nan if one of them is 0
    """
    if not all(isinstance(state, AdamWState) for state in (restored.optimizer.states or {}).values()):
        return []
    layout = restored.layout

    def vector(function: Callable[[OptimizerPiece, Tensor], Tensor]) -> Vector:
        """Return the vector of what `function` returns for each piece and its clipped gradient."""
        out = layout.zeros()
        for piece in update.whole.pieces:
            piece.of(out).copy_(function(piece, update.whole.gradient(piece)))
        return out

    def per_tensor() -> Vector:
        squares = [v.double().square().sum() for v in layout.by_name(vector(_second_moment_root)).values()]
        sizes = [restored.shard.numel(name) for name in layout.names]
        roots = (restored.reduce(torch.stack(squares)) / torch.tensor(sizes).to(squares[0])).sqrt()
        momenta = layout.by_name(vector(_momentum)).values()
        return layout.vector(-m / root for m, root in zip(momenta, roots, strict=True))

    # Their scale is arbitrary. Made one at a time, because each has an entry for every trainable parameter.
    directions: dict[str, Callable[[], Vector]] = {
        "adam": lambda: update.delta,
        "momentum-free adam": lambda: vector(lambda piece, gradient: piece.delta(gradient).gradient),
        "rms-only": per_tensor,
        "identity": lambda: vector(lambda piece, gradient: -_momentum(piece, gradient)),
        "sgd": lambda: vector(lambda _, gradient: -gradient),
    }
    return [_compare(restored, name, step(), update, direction) for name, step in directions.items()]


def _compare(
    restored: RestoredTrainer, name: str, step: Vector, update: Update, direction: Sequence[Vector]
) -> dict[str, Any]:
    real = update.delta
    pairs = [(step, step), (real, real), (real, step), *((x, step) for x in direction)]
    pairs += [(update.gradient, real), (update.gradient, step)]
    products = restored.reduce(torch.stack([dot(a, b) for a, b in pairs])).tolist()
    square, real_square, product, per_token, per_sequence, real_slope, slope = products
    norm = math.sqrt(square)
    real_norm = math.sqrt(real_square)
    scale = real_norm / norm if norm > 0 else math.nan
    both_gain = max(real_slope, slope) < 0.0  # the gradient is that of the loss
    return {
        "name": name,
        "delta_h1": scale * per_token,
        "delta_h1_sequence": scale * per_sequence,
        "delta_h1_same_gain": real_slope / slope * per_token if both_gain else math.nan,
        "cosine": product / (real_norm * norm) if real_norm * norm > 0 else math.nan,
    }


def _momentum(piece: OptimizerPiece, gradient: Tensor) -> Tensor:
    """Return m of this step, (n,)."""
    assert isinstance(piece.state, AdamWState)
    return torch.lerp(gradient, piece.state.exp_avg, piece.state.betas[0])


def _second_moment_root(piece: OptimizerPiece, gradient: Tensor) -> Tensor:
    """Return √v̂ of this step, (n,)."""
    state = piece.state
    assert isinstance(state, AdamWState)
    beta2 = state.betas[1]
    second = torch.lerp(gradient.square(), state.exp_avg_sq, beta2)
    return (second / (1.0 - beta2 ** (state.step + 1))).sqrt()

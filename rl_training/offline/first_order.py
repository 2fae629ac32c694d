"""First-order prediction of the entropy change: δH₁ = X̄·δθ, with X̄ = ∂H estimated from E and the step δθ from U.

E and U are independent, so the product is unbiased without cross-fitting. Its variance is the sum of two jackknife
variances: one leaves out a block of E's prompts at a time, the other a fold of U's prompts:

    se² = se²_E + se²_U         two independent samples

Leaving out a block keeps the mean entropy H_tok inside X and its sequences' baselines fixed. Leaving out a fold
recomputes the optimizer's step, clipping included.

`condition` shows how much of δH₁ is due to the optimizer: it repeats the prediction with the same X̄ and U under other
preconditioners. With g the clipped gradient of U, m ← β1 m + (1−β1) g, and v̂ and P = 1/(√v̂ + ε) those of this step,
the directions are

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

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.entropy.advantage_covariance import covariance_terms, minus_covariance
from rl_training.entropy.attribution import Attribution
from rl_training.entropy.fresh_sample import TARGETS, weights_of_buffer, without_blocks
from rl_training.gradients.loss_weights import gradient_of
from rl_training.offline.buffers import SampledBuffer, UpdateBuffer
from rl_training.offline.phases import Progress, silent
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.update import Update
from rl_training.optim.adamw import AdamWState
from rl_training.optim.updates import CAUSES, split_products
from rl_training.parallel.vectors import CHUNK_SIZE_CPU, Layout, dot
from rl_training.statistics.estimate import MIN_UNITS_OFFLINE
from rl_training.statistics.jackknife import Replicates

WHOLE = "whole"
TOKEN = 0
SEQUENCE = 1


@dataclass(frozen=True)
class FirstOrder:
    """δH₁ per token and per sequence, in nats, by label, such as "whole", "part/momentum", "layer/0" or "kind/mlp"."""

    labels: tuple[str, ...]
    over_evaluation: Replicates  # (labels, 2), leaving out blocks of E
    over_update: Replicates  # (labels, 2), leaving out folds of U
    direction: Tensor  # (2, P), X̄ per token and per sequence

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
    layout = Layout(restored.parameters)
    splits = Attribution(list(restored.parameters))
    blocks = evaluation.blocks(microbatch_size)
    mask = evaluation.scores.mask
    sums = torch.zeros(blocks.count, 1 + len(splits.labels), 2, dtype=torch.float64, device=mask.device)
    direction = update.delta.new_zeros(2, len(update.delta))
    parameters = list(restored.parameters.values())
    weights = weights_of_buffer(evaluation, TARGETS)
    block = blocks.number[evaluation.score_rows]
    for number in block.unique().tolist():
        for rows in (block == number).nonzero().squeeze(1).split(microbatch_size):
            with restored.policy.measuring():
                fresh = restored.policy.score(evaluation.rollout, rows)
                token, sequence = (weight.of_rows(rows, fresh.logps.shape[1]) for weight in weights)
                gradients = [
                    gradient_of(fresh, target.logps, target.entropies, parameters, keep_graph=target is token)
                    for target in (token, sequence)
                ]
            mean = torch.stack([torch.cat(layout.vector(gradient)) for gradient in gradients])
            mean /= evaluation.num_sequences
            direction += mean
            products = split_products(update.in_pieces(), [layout.split(x) for x in mean], len(parameters))
            sums[number] += _by_label(splits, products)
            progress(len(rows) * restored.num_ranks)
    direction = restored.reduce(direction)
    over_evaluation = without_blocks(restored.reduce(sums), mask, blocks)
    return FirstOrder((WHOLE, *splits.labels), over_evaluation, without_folds(restored, update, direction), direction)


def _by_label(splits: Attribution, products: Tensor) -> Tensor:
    """Sum (causes + parameters, 2) products by label, (labels, 2): the whole step first, then its splits."""
    return torch.cat([products[: len(CAUSES)].sum(dim=0, keepdim=True), splits.sum(products)])


def without_folds(restored: RestoredTrainer, update: Update, direction: Tensor) -> Replicates:
    """Return X̄·δθ by label, (labels, 2), with its value for the step without each fold of U. Collective."""
    layout = Layout(restored.parameters)
    splits = Attribution(list(restored.parameters))
    directions = [layout.split(x) for x in direction]
    count = len(layout.names)
    value = _by_label(splits, split_products(update.in_pieces(), directions, count))
    without = value.new_zeros(update.num_folds, *value.shape)
    for k, fold in enumerate(update.local_folds):
        without[fold] = _by_label(splits, split_products(update.without.parts(k), directions, count))
    return Replicates(value, restored.reduce(without))


def covariance_of(restored: RestoredTrainer, buffer: UpdateBuffer, update: Update) -> Replicates:
    """Return −Cov(log π, A) over all of U, (2,) per token and per sequence, with its value without each prompt.

    This is the entropy predictor of Cui et al. Its scale is unknown: see entropy/advantage_covariance.py. Collective.
    """
    terms = covariance_terms(update.scores, buffer.rollout.advantages)
    by_prompt = terms.new_zeros(buffer.num_prompts, *terms.shape[1:])
    by_prompt = restored.reduce(by_prompt.index_add_(0, buffer.rollout.prompt_index, terms))
    total = by_prompt.sum(dim=0)
    return Replicates(minus_covariance(total), minus_covariance(total - by_prompt))


# --- other preconditioners --------------------------------------------------------------------------------------------


def condition(restored: RestoredTrainer, update: Update, direction: Tensor) -> list[dict[str, Any]]:
    """Predict δH₁ under each preconditioner, in nats. See the module docstring.

    Args:
        direction: X̄ per token and per sequence, (2, P).

    Returns:
        One row per direction; no rows if the optimizer is not Adam:

            delta_h1, delta_h1_sequence   at the real step's norm; nan if the direction is 0
            delta_h1_same_gain            per token, at the real step's gain in reward; nan unless both gains are > 0
            cosine                        between the direction and the real step; nan if one of them is 0
    """
    if not all(isinstance(piece.state, AdamWState) for piece in update.pieces):
        return []
    gradient = update.clip * update.gradient
    sqrt_v = _map_pieces(update, gradient, _sqrt_second_moment)
    momentum = _map_pieces(
        update, gradient, lambda state, piece_gradient: torch.lerp(piece_gradient, state.exp_avg, state.betas[0])
    )
    sizes = [param.numel() for param in restored.parameters.values()]
    # Their scale is arbitrary. Made one at a time, because each has an entry for every trainable parameter.
    directions: dict[str, Callable[[], Tensor]] = {
        "adam": lambda: update.delta,
        "momentum-free adam": lambda: update.parts.gradient,
        "rms-only": lambda: torch.cat(
            [-m / v.square().mean().sqrt() for m, v in zip(momentum.split(sizes), sqrt_v.split(sizes), strict=True)]
        ),
        "identity": lambda: -momentum,
        "sgd": lambda: -gradient,
    }
    return [_compare(name, step(), update.delta, gradient, direction) for name, step in directions.items()]


def _compare(name: str, step: Tensor, real: Tensor, gradient: Tensor, direction: Tensor) -> dict[str, Any]:
    norm = math.sqrt(_inner(step, step))
    real_norm = math.sqrt(_inner(real, real))
    gain = -_inner(gradient, real)
    own_gain = -_inner(gradient, step)
    per_token = _inner(direction[TOKEN], step)
    scale = real_norm / norm if norm > 0 else math.nan
    return {
        "name": name,
        "delta_h1": scale * per_token,
        "delta_h1_sequence": scale * _inner(direction[SEQUENCE], step),
        "delta_h1_same_gain": gain / own_gain * per_token if own_gain > 0 and gain > 0 else math.nan,
        "cosine": _inner(real, step) / (real_norm * norm) if real_norm * norm > 0 else math.nan,
    }


def _map_pieces(update: Update, gradient: Tensor, function: Callable[[AdamWState, Tensor], Tensor]) -> Tensor:
    """Apply `function` to each piece's state and gradient, and concatenate the results, (P,)."""
    return torch.cat([function(piece.state, gradient[piece.flat]) for piece in update.pieces])  # type: ignore[arg-type]


def _sqrt_second_moment(state: AdamWState, gradient: Tensor) -> Tensor:
    """Return √v̂ of this step, (n,)."""
    beta2 = state.betas[1]
    second = torch.lerp(gradient.square(), state.exp_avg_sq, beta2)
    return (second / (1.0 - beta2 ** (state.step + 1))).sqrt()


def _inner(a: Tensor, b: Tensor) -> float:
    """Return the inner product in fp64, computed part by part to save memory."""
    return float(dot(list(a.split(CHUNK_SIZE_CPU)), list(b.split(CHUNK_SIZE_CPU))))

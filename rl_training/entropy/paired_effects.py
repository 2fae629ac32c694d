"""ΔH and Δreward of changing a step, with errors: products with the changes of the update, summed over folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_training.entropy.changed_steps import (
    Change,
    ChangedUpdates,
    Direction,
    changes_by_basis,
    iter_basis_gradients,
)
from rl_training.entropy.data import LENGTH, SEQUENCES, TOTALS, EntropyPrediction
from rl_training.optim.leave_one_out import FoldMeans, LeaveOneOutUpdates
from rl_training.parallel.fold_vectors import FoldVectors
from rl_training.statistics.jackknife import jackknife_covariance, stderr_reason
from rl_training.statistics.running_pairs import Pair
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import Batch
from rl_training.step.data import StepData
from rl_training.step.loss_weights import LossWeights
from rl_training.step.passes import Passes


def paired_effects_reason(step: StepData, prediction: EntropyPrediction, off_policy: Unavailable) -> Unavailable | None:
    """Return the reason why the step can have no paired effects with errors, or None.

    Args:
        step: The step.
        prediction: Its predicted change of entropy.
        off_policy: The reason to return for an off-policy step.
    """
    reused = step.reasons.reused
    other_policy = None if step.batch.rollout.on_policy else off_policy
    return (
        reused or other_policy or prediction.reason or prediction.forward_reason or stderr_reason(step.batch.num_folds)
    )


def effect_of(prediction: EntropyPrediction, products: Tensor, corrections: Tensor | float = 0.0) -> Pair:
    """Return ΔH per token and Δreward per response of one change; nan for what `products` lacks.

    Only valid if `paired_effects_reason` returns None.

    Args:
        prediction: The step's predicted change of entropy.
        products: Products by fold from `ChangedUpdates.products`, (K, directions). The directions are X and, if known,
            the gradient of the reward.
        corrections: Their leave-one-out corrections, (K, directions).
    """
    assert prediction.totals is not None
    totals = prediction.totals.cpu()
    terms = torch.cat([totals, totals[:, [SEQUENCES]] * products], dim=1)
    total = terms.sum(dim=0)
    without = total - terms
    without[:, len(TOTALS) :] += corrections
    values = _per_token_and_response(total)
    covariance = jackknife_covariance(_per_token_and_response, total, without)
    return Pair(values, covariance, len(totals) - 1)


def updates_and_entropy_gradients(prediction: EntropyPrediction) -> tuple[LeaveOneOutUpdates, FoldVectors]:
    """Return the updates without each fold, and X of each fold, of a step that has paired effects."""
    assert prediction.leave_one_out is not None
    assert prediction.entropy_gradients is not None, "it takes Need.FOLD_ENTROPY_GRADIENTS"
    return prediction.leave_one_out, prediction.entropy_gradients


def paired_effects(
    step: StepData,
    prediction: EntropyPrediction,
    passes: Passes,
    changes: Mapping[str, Change | None],
    weights: Mapping[str, Tensor],
    reward: float | LossWeights | None,
) -> dict[str, Pair]:
    """Return ΔH per token and Δreward per response of each change, by name. Collective.

    Only valid if `paired_effects_reason` returns None.

    Args:
        step: The step.
        prediction: Its predicted change of entropy.
        passes: The policy, the ranks and the reduction that sums gradients by fold.
        changes: Changes that only need the step's own gradient. None stands for the step as it is.
        weights: The weights of each changed loss, (2, B, T).
        reward: The reward's gradient: a multiple of the step's own, or the weights of a loss that has it. None: every
            Δreward is nan.
    """
    updates, x = updates_and_entropy_gradients(prediction)
    unchanged = step.batch.loss_weights.stacked()
    added_weights = {name: table - unchanged for name, table in weights.items()}
    of_step = None if step.reasons.other_terms else unchanged
    without_basis, by_basis = changes_by_basis(added_weights, of_step, passes.ranks)
    directions = [Direction(x)]
    names = list(by_basis)
    reward_weights = [reward] if isinstance(reward, LossWeights) else []  # its gradient comes before the bases
    basis_weights = [*reward_weights, *(LossWeights.of_stacked(added_weights[name]) for name in names)]
    bases = iter_basis_gradients(step.batch, passes, basis_weights)
    if reward_weights:
        _, gradient = next(bases)
        directions.append(Direction(gradient.by_fold, gradient.mean))
    elif isinstance(reward, float):
        directions.append(Direction(updates.gradient.by_fold, updates.gradient.mean, reward))
    pairs: dict[str, Pair] = {}

    def measure(changes: Mapping[str, Change | None], basis: FoldMeans | None = None) -> None:
        products = ChangedUpdates(updates, basis).products(list(changes.values()), directions)
        pairs.update((name, effect_of(prediction, *product)) for name, product in zip(changes, products, strict=True))

    measure({**changes, **without_basis})
    for index, basis in bases:  # one at a time, because they are large
        measure(by_basis[names[index - len(reward_weights)]], basis)
        del basis
    return pairs


def gradient_shares(
    batch: Batch, prediction: EntropyPrediction, passes: Passes, weights: Sequence[LossWeights]
) -> tuple[Tensor, list[Tensor]]:
    """Return how much of ΔH comes from the step's fresh gradient, and from each of these weightings. Collective.

    Only valid if `paired_effects_reason` returns None.

    Returns:
        Products by fold for `effect_of`, (K, 1) each.
    """
    updates, x = updates_and_entropy_gradients(prediction)

    def products(basis: FoldMeans | None) -> Tensor:
        return ChangedUpdates(updates, basis).products_of_part(Direction(x))

    by_index = {}
    for index, basis in iter_basis_gradients(batch, passes, weights):
        by_index[index] = products(basis)
        del basis  # free it before the next is made
    return products(None), [by_index[index] for index in range(len(weights))]


def _per_token_and_response(sums: Tensor) -> Tensor:
    """Return ΔH per token and Δreward per response, (..., 2). Δreward is nan without the gradient of the reward.

    Args:
        sums: The totals, Σ n_k X_k · Δ_(−k), and perhaps Σ n_k J_k · Δ_(−k), (..., TOTALS + directions).
    """
    products = sums[..., len(TOTALS) :]
    values = products / sums[..., [LENGTH, SEQUENCES][: products.shape[-1]]]
    return nn.functional.pad(values, (0, 2 - values.shape[-1]), value=torch.nan)

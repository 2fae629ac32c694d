"""Everything that is reported about a step's entropy: a smooth function of sums over folds, with jackknife errors.

Each fold k contributes its terms. They start with the fold's totals: the number of sequences, their entropies and their
lengths, weighted by prefix ratios if another policy sampled them. Then comes n_k X_k · δθ for each update δθ, with
X = E[T] ∂H_tok = ∂H_seq − H_tok ∂E[T] per token and X = ∂H_seq per sequence. With predictions per sequence, the sums
without a fold use the H_tok of the other folds. Without them H_tok is treated as a constant, and error bars per token
are a few percent too small (docs/explanation/theory.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_training.entropy.data import BACKWARD, FORWARD, LENGTH_AND_REWARD, PRODUCTS, EntropyPrediction, Quantity
from rl_training.entropy.products import FoldProducts
from rl_training.entropy.reward_gradient import reward_gradient, reward_products
from rl_training.parallel.ranks import Ranks
from rl_training.statistics.jackknife import MIN_FOLDS_STEP, jackknife_stderr
from rl_training.statistics.running_variance import RunningVariance
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.data import StepData

NUM_TOTALS = 3  # columns before the products
HALF_STEP = "half_step"  # ½(forward + backward), of which only the error is needed


def fold_table(
    step: StepData, ranks: Ranks, prediction: EntropyPrediction, products: FoldProducts
) -> tuple[Tensor, Tensor, Unavailable | None]:
    """Return the terms of all folds. Collective.

    Returns:
        The terms, (K, columns), in host memory: totals, then two columns per product, the reward's last. Then their
        leave-one-out corrections Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ), (K, products, 2), and why the reward's products are
        nan, or None.
    """
    assert prediction.totals is not None
    by_fold, corrections = products.sum_over_ranks(ranks)
    joined = [prediction.totals, by_fold.flatten(1), corrections.flatten(1)]
    table = torch.cat(joined, dim=1).cpu()  # in one copy, for which the device is waited for once
    factor = None
    reward_reason = None
    if prediction.settings.per_sequence:
        gradient = reward_gradient(step.batch, ranks, step.reasons)
        factor = gradient.factor
        reward_reason = gradient.factor_reason
    reward_table = reward_products(step.batch.fold_sizes, prediction.leave_one_out, factor)
    reward, reward_corrections = reward_table.split(1, dim=1)
    terms, corrections = table.split([NUM_TOTALS + by_fold[0].numel(), corrections[0].numel()], dim=1)
    terms = torch.cat([terms, torch.full_like(reward, torch.nan), reward], dim=1)
    corrections = torch.cat([corrections, torch.zeros_like(reward), reward_corrections], dim=1)
    return terms, corrections.unflatten(1, (-1, 2)), reward_reason


def with_quantities(
    prediction: EntropyPrediction, step: StepData, ranks: Ranks, errors: RunningVariance, products: FoldProducts
) -> EntropyPrediction:
    """Add the quantities by name: entropy, each product and each split of `forward`. Collective.

    An unavailable quantity is nan with a reason. The variances of products are averaged with those of the last steps,
    `errors`, because one batch can miss rare responses and look too certain.
    """
    per_sequence = prediction.settings.per_sequence
    terms, corrections, reward_reason = fold_table(step, ranks, prediction, products)
    total = terms.sum(dim=0)
    level = float(total[1] / total[2]) if per_sequence else 0.0  # 0 if there is no entropy at all: nothing to vary
    without = sums_without(total, terms, corrections, level or None)
    values = statistic(total)
    stderrs = jackknife_stderr(statistic, total, without)
    by_name = dict(zip(names_of(prediction.labels), zip(values, stderrs, strict=True), strict=True))
    _, half_step = by_name.pop(HALF_STEP)
    if not per_sequence:
        del by_name[LENGTH_AND_REWARD]
    if step.batch.num_folds < 2:
        half_step = torch.full_like(half_step, torch.nan)
    if step.batch.num_folds < MIN_FOLDS_STEP:
        by_name = {name: (value, torch.full_like(value, torch.nan)) for name, (value, _) in by_name.items()}
    reasons = {"entropy": None, "backward": prediction.backward_reason, "reuse": step.optimizer.reason}
    entropy, *changes = (
        Quantity(name, value, stderr, step.number).masked_if(reasons.get(name, prediction.forward_reason))
        for name, (value, stderr) in by_name.items()
    )
    variance_of_batch = torch.stack([change.stderr for change in changes]).square()
    decay = prediction.settings.error_decay
    variances, batches = errors.add(variance_of_batch, step.number, decay).average(decay)
    averaged = [
        dataclasses.replace(change, stderr=stderr, batches=count, stderr_of_batch=change.stderr)
        for change, stderr, count in zip(changes, variances.sqrt().view(-1, 2), batches.view(-1, 2), strict=True)
    ]
    quantities = {quantity.name: quantity for quantity in (entropy, *averaged)}
    quantities["backward"] = dataclasses.replace(quantities["backward"], about_step=step.number - 1)
    return dataclasses.replace(
        prediction,
        quantities=quantities,
        variance_of_batch=variance_of_batch,
        half_step_stderr=half_step,
        reward_reason=reward_reason,
    )


def names_of(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the quantities of `statistic`, given those of the products beyond PRODUCTS."""
    return ("entropy", *PRODUCTS, *labels, LENGTH_AND_REWARD, HALF_STEP)


def statistic(sums: Tensor) -> Tensor:
    """Calculate everything that is reported, from sums over folds.

    Args:
        sums: The totals, then two columns per product, the reward's last, (..., columns).

    Returns:
        (..., 1 + products + 2, 2), as `names_of` names them: the entropy and each product, per token and per sequence;
        the changes of length and reward; and ½(forward + backward), the batch's term of the cumulative trapezoid.
        `forward` and `backward` share the batch's noise, so the error of their sum must be calculated from the sum
        itself.
    """
    sequences, entropy, length = sums[..., :NUM_TOTALS].unbind(-1)
    counts = torch.stack([length, sequences], dim=-1).unsqueeze(-2)  # of tokens and of sequences
    entropies = entropy[..., None, None].expand_as(counts)
    products = sums[..., NUM_TOTALS:].unflatten(-1, (-1, 2))
    *values, reward = torch.cat([entropies, products], dim=-2).div(counts).unbind(-2)
    per_token, per_sequence = products[..., FORWARD, :].unbind(-1)  # they differ by H_tok ∂E[T]
    length_change = (per_sequence - per_token) * length / entropy / sequences
    half_step = 0.5 * (values[1 + FORWARD] + values[1 + BACKWARD])
    return torch.stack([*values, torch.stack([length_change, reward[..., 1]], dim=-1), half_step], dim=-2)


def sums_without(total: Tensor, by_fold: Tensor, corrections: Tensor, level: float | None) -> Tensor:
    """Return the sums without each fold, (K, columns).

    Args:
        total: Sums over all folds, (columns,).
        by_fold: The terms of each fold, (K, columns).
        corrections: The leave-one-out corrections Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ), (K, products, 2).
        level: The H_tok in X, replaced without fold l by the H_tok of the other folds. None: H_tok is a constant.
    """
    without = total - by_fold
    pairs = without[:, NUM_TOTALS:].unflatten(1, (-1, 2))
    pairs += corrections
    if level is not None:  # ∂E[T] is the difference between ∂H_seq and ∂H_seq − H_tok ∂E[T], divided by H_tok
        token, sequence = pairs.unbind(-1)
        token += (1.0 - without[:, 1:2] / without[:, 2:3] / level) * (sequence - token)
    return without

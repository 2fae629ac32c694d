"""Everything that is reported about a step's entropy: a smooth function of sums over folds, with jackknife errors.

Each fold k contributes its terms, a row of a table (`FoldSums`). It has the fold's totals: the number of sequences,
their entropies and their lengths, weighted by prefix ratios if another policy sampled them. And it has the products
n_k X_k · δθ with each update δθ, with X = E[T] ∂H_tok = ∂H_seq − H_tok ∂E[T] per token and X = ∂H_seq per sequence.

    terms of the folds ──sum──> total ──────────────> statistic ──> values
           └── total − terms + corrections ──> sums without each fold ──> statistic ──> jackknife errors

With predictions per sequence, the sums without a fold use the H_tok of the other folds. Without them H_tok is treated
as a constant, and error bars per token are a few percent too small (docs/explanation/theory.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl_training.entropy.data import (
    ENTROPY,
    FORWARD,
    LENGTH,
    LENGTH_CHANGE,
    REWARD_CHANGE,
    SEQUENCES,
    EntropyPrediction,
    FoldSums,
    Quantity,
    product_names,
    quantity_names,
)
from rl_training.entropy.products import FoldProducts
from rl_training.entropy.reward_gradient import reward_gradient, reward_products
from rl_training.parallel.ranks import Ranks
from rl_training.statistics.jackknife import MIN_FOLDS_STEP, Replicates
from rl_training.statistics.running_variance import RunningVariance
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.data import StepData

HALF_STEP = "half_step"  # ½(forward + backward), of which only the error is needed


def terms_of_folds(
    step: StepData, ranks: Ranks, prediction: EntropyPrediction, products: FoldProducts
) -> tuple[FoldSums, FoldSums, Unavailable | None]:
    """Return what each fold contributes to the sums. Collective.

    Returns:
        The terms of each fold, then the leave-one-out corrections Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ) of the products of
        each fold l, both in host memory. Then the reason why the reward's products are nan, or None.
    """
    assert prediction.totals is not None
    totals, fold_products, corrections = _to_host(prediction.totals, *products.sum_over_ranks(ranks))
    gradient, reward_reason = reward_gradient(step, ranks) if prediction.settings.per_sequence else (None, None)
    factor = gradient if isinstance(gradient, float) else None
    reward, reward_corrections = reward_products(step.batch.fold_sizes, prediction.leave_one_out, factor)
    terms = FoldSums.of(totals, fold_products, reward)
    return terms, FoldSums.of(torch.zeros_like(totals), corrections, reward_corrections), reward_reason


def with_quantities(
    prediction: EntropyPrediction, step: StepData, ranks: Ranks, errors: RunningVariance, products: FoldProducts
) -> EntropyPrediction:
    """Add the quantities by name: entropy, each product and each split of `forward`. Collective.

    The variances of all but entropy are averaged with those of the last steps, `errors`, because one batch can miss
    rare responses and look too certain.
    """
    terms, corrections, reward_reason = terms_of_folds(step, ranks, prediction, products)
    by_name = with_errors(terms, corrections, prediction.labels, level_varies=prediction.settings.per_sequence)
    _, half_step_stderr = by_name[HALF_STEP]
    if step.batch.num_folds < 2:
        half_step_stderr = torch.full_like(half_step_stderr, torch.nan)
    entropy, *predicted = _quantities_of_batch(by_name, prediction, step)
    decay = prediction.settings.error_decay
    variances_of_batch = torch.cat([quantity.stderr.square() for quantity in predicted])
    averages = errors.add(variances_of_batch, step.number, decay).average(decay)
    variances, batches = (average.split([len(quantity.stderr) for quantity in predicted]) for average in averages)
    averaged = [
        dataclasses.replace(quantity, stderr=variance.sqrt(), batches=count, stderr_of_batch=quantity.stderr)
        for quantity, variance, count in zip(predicted, variances, batches, strict=True)
    ]
    return dataclasses.replace(
        prediction,
        quantities={quantity.name: quantity for quantity in (entropy, *averaged)},
        half_step_stderr=half_step_stderr,
        reward_reason=reward_reason,
    )


def _quantities_of_batch(
    by_name: Mapping[str, tuple[Tensor, Tensor]], prediction: EntropyPrediction, step: StepData
) -> list[Quantity]:
    """Return the quantities with the errors of this batch alone. One that is unavailable is nan with a reason.

    Args:
        by_name: The value and the error of each, from `with_errors`.
        prediction: The prediction, of which reasons and settings are used.
        step: The step.
    """
    reasons = {"entropy": None, "backward": prediction.backward_reason, "reuse": step.optimizer.reason}
    quantities = []
    for name in quantity_names(prediction.labels):
        if name in (LENGTH_CHANGE, REWARD_CHANGE) and not prediction.settings.per_sequence:
            continue
        value, stderr = by_name[name]
        if step.batch.num_folds < MIN_FOLDS_STEP:
            stderr = torch.full_like(stderr, torch.nan)
        about_step = step.number - 1 if name == "backward" else step.number
        quantity = Quantity(name, value, stderr, about_step, batches=torch.ones_like(value))
        quantities.append(quantity.masked_if(reasons.get(name, prediction.forward_reason)))
    return quantities


def with_errors(
    terms: FoldSums, corrections: FoldSums, labels: Sequence[str], *, level_varies: bool
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the value and the jackknife error of everything that `statistic` names, shaped as there.

    Args:
        terms: The terms of each fold.
        corrections: The leave-one-out corrections of its products.
        labels: The names of the splits of `forward`.
        level_varies: Whether sums without a fold use the H_tok of the other folds.
    """
    total = FoldSums(terms.table.sum(dim=0))
    level = None
    if level_varies:
        level = float(total.totals[ENTROPY] / total.totals[LENGTH]) or None  # without any entropy, nothing varies
    values = statistic(total, labels)
    without = statistic(sums_without(total, terms, corrections, level), labels)
    flat = Replicates(*(torch.cat([*by_name.values()], dim=-1) for by_name in (values, without)))
    errors = flat.stderr.split([len(value) for value in values.values()])
    return {name: (value, error) for (name, value), error in zip(values.items(), errors, strict=True)}


def statistic(sums: FoldSums, labels: Sequence[str]) -> dict[str, Tensor]:
    """Calculate everything that is reported, from sums over folds.

    Args:
        sums: The sums.
        labels: The names of the splits of `forward`.

    Returns:
        By name: the entropy and each product, (…, 2), per token and per sequence; the changes of length and reward,
        (…, 1), per sequence. HALF_STEP, (…, 2), is the batch's term of the cumulative trapezoid: `forward` and
        `backward` share the batch's noise, so the error of their sum must be calculated from the sum itself.
    """
    totals = sums.totals
    sequences = totals[..., SEQUENCES]
    entropy = totals[..., ENTROPY]
    length = totals[..., LENGTH]
    counts = torch.stack([length, sequences], dim=-1)  # of tokens and of sequences
    means = (sums.products / counts.unsqueeze(-2)).unbind(-2)
    of_entropy = dict(zip(product_names(labels), means, strict=True))
    per_token, per_sequence = sums.products[..., FORWARD, :].unbind(-1)  # they differ by H_tok ∂E[T]
    length_change = (per_sequence - per_token) * length / entropy / sequences
    return {
        "entropy": entropy.unsqueeze(-1) / counts,
        **of_entropy,
        LENGTH_CHANGE: length_change.unsqueeze(-1),
        REWARD_CHANGE: (sums.reward / sequences).unsqueeze(-1),
        HALF_STEP: 0.5 * (of_entropy["forward"] + of_entropy["backward"]),
    }


def sums_without(total: FoldSums, terms: FoldSums, corrections: FoldSums, level: float | None) -> FoldSums:
    """Return the sums without each fold, (K, …).

    Args:
        total: Sums over all folds.
        terms: The terms of each fold.
        corrections: The leave-one-out corrections Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ) of products; 0 for totals.
        level: The H_tok in X, replaced without fold l by the H_tok of the other folds. None: H_tok is a constant.
    """
    without = FoldSums(total.table - terms.table + corrections.table)
    if level is not None:  # ∂E[T] is the difference between ∂H_seq and ∂H_seq − H_tok ∂E[T], divided by H_tok
        token, sequence = without.products.unbind(-1)  # views of the table
        level_of_others = (without.totals[:, ENTROPY] / without.totals[:, LENGTH]).unsqueeze(1)
        token += (1.0 - level_of_others / level) * (sequence - token)
    return without


def _to_host(*tables: Tensor) -> list[Tensor]:
    """Copy tables with a row for each fold to host memory at once, so that the device is waited for once."""
    sizes = [table[0].numel() for table in tables]
    parts = torch.cat([table.flatten(1) for table in tables], dim=1).cpu().split(sizes, dim=1)
    return [part.unflatten(1, table.shape[1:]) for part, table in zip(parts, tables, strict=True)]

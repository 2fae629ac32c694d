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
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.entropy.data import (
    BACKWARD,
    ENTROPY,
    FORWARD,
    LENGTH,
    LENGTH_AND_REWARD,
    SEQUENCES,
    TOTALS,
    EntropyPrediction,
    Quantity,
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
REWARD = -1  # the last product: that of the reward's gradient, per response. Its number per token is nan


@dataclass(frozen=True)
class FoldSums:
    """Sums over folds, of which everything that is reported is a function; or each fold's terms of them, (K, …)."""

    table: Tensor  # (…, columns): one table, so that it is summed at once

    @classmethod
    def of(cls, totals: Tensor, products: Tensor) -> FoldSums:
        """Join totals, (…, TOTALS), and products, (…, products, 2)."""
        return cls(torch.cat([totals, products.flatten(-2)], dim=-1))

    @property
    def totals(self) -> Tensor:
        """(…, TOTALS)."""
        return self.table[..., : len(TOTALS)]

    @property
    def products(self) -> Tensor:
        """n_k X_k · δθ, (…, products, 2), per token and per sequence: PRODUCTS, the splits of `forward`, the reward."""
        return self.table[..., len(TOTALS) :].unflatten(-1, (-1, 2))


def terms_of_folds(
    step: StepData, ranks: Ranks, prediction: EntropyPrediction, products: FoldProducts
) -> tuple[FoldSums, Tensor, Unavailable | None]:
    """Return what each fold contributes to the sums. Collective.

    Returns:
        The terms of each fold, then the leave-one-out corrections Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ) of the products of
        each fold l, (K, products, 2), both in host memory. Then the reason why the reward's products are nan, or None.
    """
    assert prediction.totals is not None
    totals, by_fold, corrections = _to_host(prediction.totals, *products.sum_over_ranks(ranks))
    gradient, reward_reason = reward_gradient(step, ranks) if prediction.settings.per_sequence else (None, None)
    factor = gradient if isinstance(gradient, float) else None
    reward, reward_corrections = reward_products(step.batch.fold_sizes, prediction.leave_one_out, factor)
    by_fold = torch.cat([by_fold, _per_sequence_alone(reward)], dim=1)
    corrections = torch.cat([corrections, _per_sequence_alone(reward_corrections)], dim=1)
    return FoldSums.of(totals, by_fold), corrections, reward_reason


def with_quantities(
    prediction: EntropyPrediction, step: StepData, ranks: Ranks, errors: RunningVariance, products: FoldProducts
) -> EntropyPrediction:
    """Add the quantities by name: entropy, each product and each split of `forward`. Collective.

    The variances of all but entropy are averaged with those of the last steps, `errors`, because one batch can miss
    rare responses and look too certain.
    """
    terms, corrections, reward_reason = terms_of_folds(step, ranks, prediction, products)
    numbers = replicates_of(terms, corrections, level_varies=prediction.settings.per_sequence)
    names = (*quantity_names(prediction.labels), HALF_STEP)
    by_name = dict(zip(names, zip(numbers.value, numbers.stderr, strict=True), strict=True))
    _, half_step_stderr = by_name.pop(HALF_STEP)
    if step.batch.num_folds < 2:
        half_step_stderr = torch.full_like(half_step_stderr, torch.nan)
    entropy, *changes = _quantities_of_batch(by_name, prediction, step)
    variance_of_batch = torch.stack([change.stderr for change in changes]).square()
    decay = prediction.settings.error_decay
    variances, batches = errors.add(variance_of_batch, step.number, decay).average(decay)
    averaged = [
        dataclasses.replace(change, stderr=stderr, batches=count, stderr_of_batch=change.stderr)
        for change, stderr, count in zip(changes, variances.sqrt().view(-1, 2), batches.view(-1, 2), strict=True)
    ]
    return dataclasses.replace(
        prediction,
        quantities={quantity.name: quantity for quantity in (entropy, *averaged)},
        variance_of_batch=variance_of_batch,
        half_step_stderr=half_step_stderr,
        reward_reason=reward_reason,
    )


def _quantities_of_batch(
    by_name: Mapping[str, tuple[Tensor, Tensor]], prediction: EntropyPrediction, step: StepData
) -> list[Quantity]:
    """Return the quantities with the errors of this batch alone. One that is unavailable is nan with a reason.

    Args:
        by_name: The value and the error of each, by `quantity_names`, (2,) each.
        prediction: The prediction, of which reasons and settings are used.
        step: The step.
    """
    reasons = {"entropy": None, "backward": prediction.backward_reason, "reuse": step.optimizer.reason}
    quantities = []
    for name, (value, stderr) in by_name.items():
        if name == LENGTH_AND_REWARD and not prediction.settings.per_sequence:
            continue
        if step.batch.num_folds < MIN_FOLDS_STEP:
            stderr = torch.full_like(stderr, torch.nan)
        about_step = step.number - 1 if name == "backward" else step.number
        quantity = Quantity(name, value, stderr, about_step)
        quantities.append(quantity.masked_if(reasons.get(name, prediction.forward_reason)))
    return quantities


def replicates_of(terms: FoldSums, corrections: Tensor, *, level_varies: bool) -> Replicates:
    """Return everything that is reported, as `statistic` orders it, with its values without each fold.

    Args:
        terms: The terms of each fold.
        corrections: The leave-one-out corrections of its products, (K, products, 2).
        level_varies: Whether sums without a fold use the H_tok of the other folds.
    """
    total = FoldSums(terms.table.sum(dim=0))
    level = float(total.totals[ENTROPY] / total.totals[LENGTH]) if level_varies else 0.0
    # A level of 0 has no entropy at all: nothing to vary.
    return Replicates(statistic(total), statistic(sums_without(total, terms, corrections, level or None)))


def statistic(sums: FoldSums) -> Tensor:
    """Calculate everything that is reported, from sums over folds.

    Returns:
        (…, quantities + 1, 2): as `quantity_names` names them, the entropy and each product, per token and per
        sequence, and the changes of length and reward. Last ½(forward + backward), the batch's term of the cumulative
        trapezoid: `forward` and `backward` share the batch's noise, so the error of their sum must be calculated from
        the sum itself.
    """
    totals = sums.totals
    sequences = totals[..., SEQUENCES]
    entropy = totals[..., ENTROPY]
    length = totals[..., LENGTH]
    counts = torch.stack([length, sequences], dim=-1).unsqueeze(-2)  # of tokens and of sequences
    entropies = (entropy[..., None, None] / counts).squeeze(-2)
    changes = sums.products / counts
    per_token, per_sequence = sums.products[..., FORWARD, :].unbind(-1)  # they differ by H_tok ∂E[T]
    length_change = (per_sequence - per_token) * length / entropy / sequences
    length_and_reward = torch.stack([length_change, changes[..., REWARD, 1]], dim=-1)
    half_step = 0.5 * (changes[..., FORWARD, :] + changes[..., BACKWARD, :])
    *of_entropy, _ = changes.unbind(-2)
    return torch.stack([entropies, *of_entropy, length_and_reward, half_step], dim=-2)


def sums_without(total: FoldSums, terms: FoldSums, corrections: Tensor, level: float | None) -> FoldSums:
    """Return the sums without each fold, (K, …).

    Args:
        total: Sums over all folds.
        terms: The terms of each fold.
        corrections: The leave-one-out corrections Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ), (K, products, 2).
        level: The H_tok in X, replaced without fold l by the H_tok of the other folds. None: H_tok is a constant.
    """
    without = FoldSums(total.table - terms.table)
    products = without.products  # views of the table
    products += corrections
    if level is not None:  # ∂E[T] is the difference between ∂H_seq and ∂H_seq − H_tok ∂E[T], divided by H_tok
        token, sequence = products.unbind(-1)
        level_of_others = (without.totals[:, ENTROPY] / without.totals[:, LENGTH]).unsqueeze(1)
        token += (1.0 - level_of_others / level) * (sequence - token)
    return without


def _to_host(*tables: Tensor) -> list[Tensor]:
    """Copy tables with a row for each fold to host memory at once, so that the device is waited for once."""
    sizes = [table[0].numel() for table in tables]
    parts = torch.cat([table.flatten(1) for table in tables], dim=1).cpu().split(sizes, dim=1)
    return [part.unflatten(1, table.shape[1:]) for part, table in zip(parts, tables, strict=True)]


def _per_sequence_alone(values: Tensor) -> Tensor:
    """Return numbers per sequence, (K,), as a product, (K, 1, 2), that is nan per token."""
    return torch.stack([torch.full_like(values, torch.nan), values], dim=-1).unsqueeze(1)

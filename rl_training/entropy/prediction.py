"""The first-order change of entropy by a step: X by fold times the optimizer's step, summed over whole-prompt folds.

    forward   Σ_k n_k X_k · δθ_(−k) / N     leave-fold-out: the step that the other folds alone would have made
    backward  Σ_k n_k X_k · δθ_before / N   the step before, which is independent of this batch
    reuse     Σ_k n_k X_k · δθ / N          biased: X and δθ share their noise

Each fold k contributes a row: its levels (number of sequences, their entropies and lengths, weighted by prefix ratios
where another sampler is used), and n_k X_k · δθ for every update δθ of interest, with X = E[T] ∂H_tok = ∂H_seq − H_tok
∂E[T] and, per sequence, X = ∂H_seq. Everything reported is one smooth function, `statistic`, of the sums of these rows.
With predictions per sequence, the sums without a fold use the H_tok of the other folds. Otherwise H_tok is taken as
given, and error bars per token are a few percent too small (docs/explanation/theory.md).

Vectors are this process's entries, and a fold may have sequences on several processes: products are sums over entries,
and are summed over the processes once, at the end.

Without fold l the steps of the other folds lose l too, δθ_(−k,−l) − δθ_(−k) ≈ δθ_(−l) − δθ, and with S = Σ_k n_k X_k

    Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ)  =  S · (δθ_(−l) − δθ) − n_l X_l · (δθ_(−l) − δθ).

So only S and one entropy gradient at a time are held in memory: besides the K rows of the folds' gradients, a step
holds δθ, the previous δθ, S and one X; and all X_k only where they are small, or for probes that multiply them with
changes of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from rl_training.entropy.fold_gradients import fold_gradients, levels_of_folds, prefix_ratios
from rl_training.entropy.length_and_reward import reward_gradient, reward_products
from rl_training.entropy.previous_update import PreviousUpdate
from rl_training.entropy.products import FoldProducts
from rl_training.gradients.folds import FoldGroup
from rl_training.optim.leave_one_out import LeaveOneOutUpdates, fold_means
from rl_training.optim.rounding import rounded_update
from rl_training.optim.updates import OptimizerPieces, clipping, compute_update
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.vectors import Vector, add, dots
from rl_training.statistics.estimate import MIN_FOLDS_STEP
from rl_training.statistics.jackknife import jackknife_stderr
from rl_training.statistics.kish import kish_size_of_sums, kish_sums
from rl_training.statistics.limit import Limit
from rl_training.step.batch import Batch
from rl_training.step.data import EntropyPrediction, StepData
from rl_training.step.limits import NO_SAMPLING_LOGPS, NO_TOKENS, TOO_FAR, Limits
from rl_training.step.needs import Need
from rl_training.step.quantities import LENGTH_AND_REWARD, PRODUCTS, Quantity
from rl_training.step.runtime import Runtime
from rl_training.step.score_check import ScoreCheck

LEVELS = 3  # columns of a row before the products
FORWARD, BACKWARD, REUSE, UNCLIPPED = range(len(PRODUCTS))  # indices of products
MIN_ESS = 0.5  # share of the sequences below which importance weights are worthless


def predict_entropy(step: StepData, runtime: Runtime, memory: PreviousUpdate, needs: Need) -> EntropyPrediction:
    """Return what the step does to entropy to first order, as far as `needs` asks for it. A collective.

    The memory keeps δθ for the step after.
    """
    settings = memory.settings
    labels = memory.attribution.labels
    batch = step.batch
    ranks = runtime.ranks
    limit = _entropy_gradient_limit(batch, ranks, step.limits)
    if limit:
        return _without_entropy_gradient(step, memory, limit)
    ratios = prefix_ratios(batch, ranks)
    levels = levels_of_folds(batch, ranks, ratios)
    _, entropy, length = levels.sum(dim=0).tolist()
    if not length:
        return _without_entropy_gradient(step, memory, NO_TOKENS)
    intended, update, steps = _updates(step, ranks)
    layout = step.gradients.layout
    sizes = batch.fold_sizes
    products = None
    rows = None
    if Need.ENTROPY_CHANGE in needs:
        before = memory.before(step.number)
        products = FoldProducts(layout, sizes, memory.attribution, update, before, steps, 1 + settings.per_sequence)
    if Need.ENTROPY_ROWS in needs:
        rows = layout.zeros(len(sizes), device=memory.device)
    check = ScoreCheck(batch, runtime.policy)
    by_group: Iterable[tuple[FoldGroup, list[Vector]]] = fold_gradients(
        batch, runtime, ratios, entropy / length, settings, check
    )
    if layout.is_small:  # then all come first: passes and products in turns would drive each other out of a CPU's cache
        by_group = list(by_group)
    folds_at_once = len(sizes) if layout.is_small else len(batch.folds[0].folds)
    sums = products.sums if products is not None else []
    memory.count_bytes(intended, update, rows, *sums, more=folds_at_once * (1 + settings.per_sequence))
    _collect_folds(by_group, products, rows)
    change = EntropyPrediction(
        settings,
        labels,
        forward_limit=_forward_limit(step),
        backward_limit=memory.limit(step.number) or step.limits.reused,
        intended=intended,
        update=update,
        levels=levels,
        rows=rows,
        steps_without=steps,
    )
    memory.keep(step.number, None if step.optimizer.rounded else update, step.gradients.weights)
    other_scores = check.limit(ranks.reduce)
    if other_scores:  # the step itself is what it is
        return EntropyPrediction(settings, labels, other_scores, other_scores, intended=intended, update=update)
    return change if products is None else _with_quantities(change, step, ranks, memory, levels, products)


def _without_entropy_gradient(step: StepData, memory: PreviousUpdate, limit: Limit) -> EntropyPrediction:
    """Return the prediction of a step that has none, which the next one does not look back on."""
    memory.leave_out(step.number, limit)
    return EntropyPrediction(memory.settings, memory.attribution.labels, limit)


def _collect_folds(
    by_group: Iterable[tuple[FoldGroup, list[Vector]]], products: FoldProducts | None, rows: Vector | None
) -> None:
    """Add each fold's entropy gradients to the products and to the rows that are wanted."""
    for group, directions in by_group:
        for number, k in enumerate(group.folds):
            if products is not None:
                products.add(k, [[part[number] for part in x] for x in directions])
            if rows is not None:
                add([part[k] for part in rows], [part[number] for part in directions[0]])
        del directions  # before the next ones are made, beside weights that are gathered


def _entropy_gradient_limit(batch: Batch, ranks: Ranks, limits: Limits) -> Limit | None:
    """Return the limit of a step without X, or None. With another sampler a collective.

    X needs all responses to each prompt, sampled from the policy, or by a sampler with known log-probabilities.
    """
    logs = batch.log_ratios()
    limit = limits.sampling_mismatch or limits.no_baseline or limits.hooked
    if limit or logs is None:
        return limit or NO_SAMPLING_LOGPS
    if batch.rollout.sampling_logps is None:
        return None
    total, total_of_squares = ranks.reduce(kish_sums(logs.sum(dim=1).exp())).tolist()
    ess = kish_size_of_sums(total, total_of_squares) / batch.num_sequences
    return None if ess >= MIN_ESS else TOO_FAR.filled(ess=ess, least=MIN_ESS)


def _forward_limit(step: StepData) -> Limit | None:
    """Return the limit of a step of which no fold can be left out, or None."""
    limits = step.limits
    return step.optimizer.limit or step.gradients.rows_limit or limits.one_fold or limits.reused


def _updates(step: StepData, ranks: Ranks) -> tuple[Vector | None, Vector | None, LeaveOneOutUpdates | None]:
    """Return the formula's δθ, the δθ that rounded weights keep, and the steps without each fold. A collective.

    None stands for what is not available.
    """
    gradients = step.gradients
    max_grad_norm = step.optimizer.max_grad_norm
    reduce = ranks.reduce
    layout = gradients.layout
    if step.optimizer.states is None:
        return None, None, None
    mean = layout.vector(gradients.mean.values()) if layout.is_small else gradients.mean  # else joined piece by piece
    pieces = OptimizerPieces(layout, gradients.weights, step.optimizer.states)
    square = torch.zeros((), dtype=torch.float64, device=layout.device)
    for part in (piece.of(mean) for piece in pieces):
        square += dots(part, part)
    clip = float(clipping(reduce(square), max_grad_norm))
    intended = compute_update(layout, pieces, mean, clip)
    update = intended
    if step.optimizer.rounded:
        by_name = layout.by_name(intended)
        update = layout.vector(rounded_update(weight, by_name[name]) for name, weight in gradients.weights.items())
    if gradients.rows is None or _forward_limit(step):
        return intended, update, None
    folds = fold_means(mean, gradients.rows, step.batch.fold_sizes)
    return intended, update, LeaveOneOutUpdates(pieces, folds, max_grad_norm, reduce, clip)


def _with_quantities(
    change: EntropyPrediction,
    step: StepData,
    ranks: Ranks,
    memory: PreviousUpdate,
    levels: Tensor,
    products: FoldProducts,
) -> EntropyPrediction:
    """Add the quantities by name: entropy, each product and each split of `forward`. A collective.

    A quantity that is not available is nan with a reason. Variances of products are averaged over a few steps, because
    one batch can miss rare responses and look too certain.
    """
    per_sequence = change.settings.per_sequence
    names = ("entropy", *PRODUCTS, *change.labels, *[LENGTH_AND_REWARD] * per_sequence)
    multiplied, lost = products.over_processes(ranks.reduce)
    table = torch.cat([levels, multiplied.flatten(1), lost.flatten(1)], dim=1).cpu()
    factor = None
    if per_sequence:
        gradient = reward_gradient(step.batch, ranks, step.limits)
        factor = gradient.factor
        change = dataclasses.replace(change, reward_limit=gradient.factor_limit)
    reward, lost_reward = reward_products(step.batch.fold_sizes, ranks, change.steps_without, factor).split(1, dim=1)
    products_by_fold, lost = table.split([LEVELS + multiplied[0].numel(), lost[0].numel()], dim=1)
    by_fold = torch.cat([products_by_fold, torch.full_like(reward, torch.nan), reward], dim=1)
    lost = torch.cat([lost, torch.zeros_like(reward), lost_reward], dim=1).unflatten(1, (-1, 2))
    total = by_fold.sum(dim=0)
    level = float(total[1] / total[2]) if per_sequence else 0.0  # without any entropy none to vary
    without = sums_without(total, by_fold, lost, level or None)
    values = statistic(total)
    stderrs = jackknife_stderr(statistic, total, without)
    half_step = stderrs[-1] if step.batch.num_folds > 1 else torch.full_like(stderrs[-1], torch.nan)
    if step.batch.num_folds < MIN_FOLDS_STEP:
        stderrs = torch.full_like(stderrs, torch.nan)
    reasons = {"entropy": None, "backward": change.backward_limit, "reuse": step.optimizer.limit}
    entropy, *rows = (
        Quantity(name, value, stderr, step.number).masked_if(reasons.get(name, change.forward_limit))
        for name, value, stderr in zip(names, values, stderrs, strict=False)
    )
    variances, batches = memory.errors.add(torch.stack([row.stderr for row in rows]).square(), step.number)
    averaged = [
        dataclasses.replace(row, stderr=stderr, batches=count, stderr_of_batch=row.stderr)
        for row, stderr, count in zip(rows, variances.sqrt(), batches, strict=True)
    ]
    quantities = {row.name: row for row in (entropy, *averaged)}
    quantities["backward"] = dataclasses.replace(quantities["backward"], about_step=step.number - 1)
    return dataclasses.replace(change, quantities=quantities, half_step_stderr=half_step)


# --- sums over folds --------------------------------------------------------------------------------------------------


def statistic(sums: Tensor) -> Tensor:
    """Calculate everything that is reported from sums over folds.

    Args:
        sums: (..., columns), the levels, then a pair for each product; the last pair is the reward's.

    Returns:
        (..., 1 + products + 2, 2): the entropy and each product, per token and per sequence; the changes of length and
        reward; and ½(forward + backward). The two share a batch's noise, and their sum is the batch's term of the
        cumulative trapezoid, so its error is taken from the sum.
    """
    sequences, entropy, length = sums[..., :LEVELS].unbind(-1)
    number = torch.stack([length, sequences], dim=-1).unsqueeze(-2)  # of tokens, of sequences
    levels = entropy[..., None, None].expand_as(number)
    products = sums[..., LEVELS:].unflatten(-1, (-1, 2))
    *values, reward = torch.cat([levels, products], dim=-2).div(number).unbind(-2)
    per_token, per_sequence = products[..., FORWARD, :].unbind(-1)  # they differ by H_tok ∂E[T]
    longer = (per_sequence - per_token) * length / entropy / sequences
    half_step = 0.5 * (values[1 + FORWARD] + values[1 + BACKWARD])
    return torch.stack([*values, torch.stack([longer, reward[..., 1]], dim=-1), half_step], dim=-2)


def sums_without(total: Tensor, by_fold: Tensor, lost: Tensor, level: float | None) -> Tensor:
    """Return the sums without each fold, (F, columns).

    Args:
        total: (columns,), over all folds.
        by_fold: (F, columns), the terms of each fold.
        lost: (F, products, 2), the leave-one-out corrections Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ) of `forward`.
        level: the H_tok in X, which row l replaces by the H_tok of the other folds; None: it is taken as given.
    """
    without = total - by_fold
    pairs = without[:, LEVELS:].unflatten(1, (-1, 2))
    pairs += lost
    if level is not None:  # ∂E[T] is the difference of ∂H_seq and ∂H_seq − H_tok ∂E[T], divided by H_tok
        token, sequence = pairs.unbind(-1)
        token += (1.0 - without[:, 1:2] / without[:, 2:3] / level) * (sequence - token)
    return without

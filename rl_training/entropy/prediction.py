"""The first-order change of entropy by a step: X by fold times the optimizer's step, summed over whole-prompt folds.

    forward   Σ_k n_k X_k · δθ_(−k) / N     leave-fold-out: the step that the other folds alone would have made
    backward  Σ_k n_k X_k · δθ_before / N   the step before, which is independent of this batch
    reuse     Σ_k n_k X_k · δθ / N          biased: X and δθ share their noise

Where each quantity is calculated, and which limits (step/limits.py) make it nan:

    all of them         X: fold_gradients.py                          `limit`, from _entropy_gradient_limit:
                                                                      sampling_mismatch, split_prompts, one_response,
                                                                      hooked, no_sampling_logps, sampler_too_far,
                                                                      no_tokens; from step/score_check.py: other_scores
    entropy             levels_of_folds in fold_gradients.py          none beside
    forward, its        FoldProducts._forward in products.py          `forward_limit`, from _forward_limit: no formula
    splits, unclipped                                                 of the optimizer (optim/state.py), one_fold,
                                                                      reused, `rows_limit` (engine/build_step.py)
    backward            FoldProducts._dots in products.py             `backward_limit`: first_step, step_not_measured,
                                                                      step_taken_again, or what the step before was
                                                                      (previous_update.py); reused
    reuse               FoldProducts._dots in products.py             no formula of the optimizer
    change of length    statistic in fold_sums.py                     `forward_limit`
    change of reward,   reward_products in length_and_reward.py       `forward_limit`, and `reward_limit`, from
    delta_reward/…                                                    reward_gradient: other_loss, other_terms,
                                                                      no_rewards, no_others, no_sampling_logps
    every error bar     with_quantities in fold_sums.py               fewer than MIN_FOLDS_STEP folds

A KL term of the loss, say, makes `delta_reward/forward` nan (other_loss, from _multiple_of_the_step there: the step's
gradient is no multiple of the reward's, but at the reference itself, where the term's is 0), and none of the others: it
is part of the loss's weights on log-probabilities. Beside this table it makes nan what asks the same of a loss: the
split of `gns` (_split_limit in probes/gns.py), and interventions that need Dr-GRPO's loss or its advantages
(unavailable_reason in interventions/named.py).

All of them are nan where engine/verifier.py finds, after the step, that it was not the optimizer's formula
(not_the_formula).

Vectors are this process's entries, and a fold may have sequences on several processes: products are sums over entries,
and are summed over the processes once, at the end.

Without fold l the steps of the other folds lose l too, δθ_(−k,−l) − δθ_(−k) ≈ δθ_(−l) − δθ, and with S = Σ_k n_k X_k

    Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ)  =  S · (δθ_(−l) − δθ) − n_l X_l · (δθ_(−l) − δθ).

So only S and one entropy gradient at a time are held in memory: besides the K rows of the folds' gradients, a step
holds δθ, the previous δθ, S and one X; and all X_k only where they are small, or for probes that multiply them with
changes of the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from rl_training.entropy.fold_gradients import fold_gradients, levels_of_folds, prefix_ratios
from rl_training.entropy.fold_sums import with_quantities
from rl_training.entropy.previous_update import PreviousUpdate
from rl_training.entropy.products import FoldProducts
from rl_training.entropy.weights import PrefixRatios
from rl_training.gradients.folds import FoldGroup
from rl_training.optim.leave_one_out import LeaveOneOutUpdates, fold_means
from rl_training.optim.rounding import rounded_update
from rl_training.optim.updates import OptimizerPieces, clipping, compute_update
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.vectors import Vector, add, dots
from rl_training.statistics.kish import kish_size_of_sums, kish_sums
from rl_training.statistics.limit import Limit
from rl_training.step.batch import Batch
from rl_training.step.data import EntropyPrediction, StepData
from rl_training.step.limits import NO_SAMPLING_LOGPS, NO_TOKENS, TOO_FAR, Limits
from rl_training.step.needs import Need
from rl_training.step.runtime import Runtime
from rl_training.step.score_check import ScoreCheck

MIN_ESS = 0.5  # share of the sequences below which importance weights are worthless


class Updates(NamedTuple):
    """What the optimizer's formula says of a step; None for what is not available."""

    intended: Vector | None = None  # δθ
    rounded: Vector | None = None  # what the rounding of the weights leaves of it; in fp32 the same vector
    without: LeaveOneOutUpdates | None = None  # the steps without each fold


def predict_entropy(step: StepData, runtime: Runtime, memory: PreviousUpdate, needs: Need) -> EntropyPrediction:
    """Return what the step does to entropy to first order, as far as `needs` asks for it. A collective.

    The memory keeps δθ for the step after.
    """
    batch, ranks = step.batch, runtime.ranks
    settings, labels = memory.settings, memory.attribution.labels
    limit = _entropy_gradient_limit(batch, ranks, step.limits)
    if limit:
        return _without_entropy_gradient(step, memory, limit)
    ratios = prefix_ratios(batch, ranks)
    levels = levels_of_folds(batch, ranks, ratios)
    _, entropy, length = levels.sum(dim=0).tolist()
    if not length:
        return _without_entropy_gradient(step, memory, NO_TOKENS)
    updates = _updates(step, ranks)
    check = ScoreCheck(batch, runtime.policy)
    products, rows = _multiply(step, runtime, memory, needs, updates, ratios, entropy / length, check)
    prediction = EntropyPrediction(
        settings,
        labels,
        forward_limit=_forward_limit(step),
        backward_limit=memory.limit(step.number) or step.limits.reused,
        intended=updates.intended,
        update=updates.rounded,
        levels=levels,
        rows=rows,
        steps_without=updates.without,
    )
    memory.keep(step.number, None if step.optimizer.rounded else updates.rounded, step.gradients.weights)
    other_scores = check.limit(ranks.reduce)
    if other_scores:  # the step itself is what it is
        return EntropyPrediction(
            settings, labels, other_scores, other_scores, intended=updates.intended, update=updates.rounded
        )
    return prediction if products is None else with_quantities(prediction, step, ranks, memory, products)


def _without_entropy_gradient(step: StepData, memory: PreviousUpdate, limit: Limit) -> EntropyPrediction:
    """Return the prediction of a step that has none, which the next one does not look back on."""
    memory.leave_out(step.number, limit)
    return EntropyPrediction(memory.settings, memory.attribution.labels, limit)


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


def _updates(step: StepData, ranks: Ranks) -> Updates:
    """Return what the optimizer's formula says of the step, and of the steps without each fold. A collective."""
    gradients = step.gradients
    layout = gradients.layout
    max_grad_norm = step.optimizer.max_grad_norm
    if step.optimizer.states is None:
        return Updates()
    mean = layout.vector(gradients.mean.values()) if layout.is_small else gradients.mean  # else joined piece by piece
    pieces = OptimizerPieces(layout, gradients.weights, step.optimizer.states)
    square = torch.zeros((), dtype=torch.float64, device=layout.device)
    for part in (piece.of(mean) for piece in pieces):
        square += dots(part, part)
    clip = float(clipping(ranks.reduce(square), max_grad_norm))
    intended = compute_update(layout, pieces, mean, clip)
    rounded = intended
    if step.optimizer.rounded:
        by_name = layout.by_name(intended)
        rounded = layout.vector(rounded_update(weight, by_name[name]) for name, weight in gradients.weights.items())
    if gradients.rows is None or _forward_limit(step):
        return Updates(intended, rounded)
    folds = fold_means(mean, gradients.rows, step.batch.fold_sizes)
    return Updates(intended, rounded, LeaveOneOutUpdates(pieces, folds, max_grad_norm, ranks.reduce, clip))


def _multiply(
    step: StepData,
    runtime: Runtime,
    memory: PreviousUpdate,
    needs: Need,
    updates: Updates,
    ratios: PrefixRatios | None,
    level: float,
    check: ScoreCheck,
) -> tuple[FoldProducts | None, Vector | None]:
    """Return the products of X with the updates, and X of each fold as rows, as far as `needs` asks. A collective.

    Args:
        step: the step.
        runtime: what calculates.
        memory: has δθ of the step before.
        needs: of the probes.
        updates: of the step.
        ratios: prefix ratios to the sampler; None: all are 1.
        level: H_tok of the whole step.
        check: receives all scores that X is made of.
    """
    batch, layout, settings = step.batch, step.gradients.layout, memory.settings
    num_targets = 1 + settings.per_sequence
    products = None
    if Need.ENTROPY_CHANGE in needs:
        before = memory.before(step.number)
        products = FoldProducts(
            layout, batch.fold_sizes, memory.attribution, updates.rounded, before, updates.without, num_targets
        )
    rows = layout.zeros(batch.num_folds, device=memory.device) if Need.ENTROPY_ROWS in needs else None
    by_group: Iterable[tuple[FoldGroup, list[Vector]]] = fold_gradients(batch, runtime, ratios, level, settings, check)
    if layout.is_small:  # then all come first: passes and products in turns would drive each other out of a CPU's cache
        by_group = list(by_group)
    folds_at_once = batch.num_folds if layout.is_small else len(batch.folds[0].folds)
    sums = products.sums if products is not None else []
    memory.count_bytes(updates.intended, updates.rounded, rows, *sums, more=folds_at_once * num_targets)
    for group, directions in by_group:
        for number, k in enumerate(group.folds):
            if products is not None:
                products.add(k, [[part[number] for part in x] for x in directions])
            if rows is not None:
                add([part[k] for part in rows], [part[number] for part in directions[0]])
        del directions  # before the next ones are made, beside weights that are gathered
    return products, rows

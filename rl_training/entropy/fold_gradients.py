"""The entropy gradient of each fold of a step, from a small forward and backward over some responses of every prompt.

If another sampler μ generated the responses, such as an engine with other numerics or older weights, each token is
weighted by its prefix ratio, ρ_ik = exp Σ_{j<k} (log π(t_ij) − log μ(t_ij)), normalised at each position over all
sequences (entropy/weights.py). On-policy, ρ = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from rl_training.entropy.data import TOTALS, EntropySettings
from rl_training.entropy.weights import normalised_ratios, policy_first, prefix_ratios, surrogate_weights
from rl_training.parallel.fold_vectors import Receiver
from rl_training.parallel.ranks import Ranks
from rl_training.policy.rollout import pad_and_concat, response_index
from rl_training.step.batch import Batch
from rl_training.step.loss_weights import LossWeights
from rl_training.step.passes import Passes, Weightings
from rl_training.step.score_check import ScoreCheck


def ratios_to_sampler(batch: Batch, ranks: Ranks) -> Tensor | None:
    """Return the ratios of prefixes, (B, T + 1), normalised over all sequences; None if all are 1. Collective.

    All ranks' tables are as wide as the widest.
    """
    log_ratios = batch.log_ratios()
    mask = batch.scores.mask
    if batch.rollout.sampling_logps is None or log_ratios is None:
        return None
    width = ranks.most(mask.shape[1], mask.device)
    log_ratios, mask = (pad_and_concat([part], at_least=width) for part in (log_ratios, mask))
    return normalised_ratios(prefix_ratios(log_ratios, mask), ranks.reduce)


def totals_of_folds(batch: Batch, ranks: Ranks, ratios: Tensor | None) -> Tensor:
    """Return the TOTALS of each fold, (K, TOTALS): its sequences, and Σ ρh and Σ ρ over their tokens. Collective.

    A fold's sums include its sequences' effect on the normaliser of each position k, (1 − ρ_ik) times the mean there,
    so that the jackknife accounts for it. These effects add up to 0 over all sequences.
    """
    exact = batch.scores.exact()
    entropies = exact.entropies
    mask = exact.mask
    sums = [entropies.sum(dim=1), mask.sum(dim=1)]
    if ratios is not None:
        before = ratios[:, :-1]
        order = policy_first(mask)
        terms = before * torch.stack(
            [pad_and_concat([part.gather(1, order)], at_least=before.shape[1]) for part in (entropies, mask)]
        )
        means = ranks.reduce(terms.sum(dim=1, keepdim=True)) / batch.num_sequences
        sums = list((terms - (before - 1.0) * means).sum(dim=-1))
    by_name = {"sequences": torch.ones_like(sums[0]), "entropy": sums[0], "length": sums[1]}
    return ranks.reduce(batch.sum_by_fold(torch.stack([by_name[name] for name in TOTALS], dim=1)))


def entropy_losses(batch: Batch, ratios: Tensor | None, level: float, settings: EntropySettings) -> list[LossWeights]:
    """Return the losses whose gradients are X: per token ∂H_seq − H_tok ∂E[T], and perhaps per sequence ∂H_seq.

    Args:
        batch: The batch of the step. Baselines use all responses of a prompt.
        ratios: From `ratios_to_sampler`.
        level: H_tok of the whole step, with which E[T] ∂H_tok = ∂H_seq − H_tok ∂E[T] takes a single backward.
        settings: Whether X per sequence is wanted.
    """
    scores = batch.scores
    index = batch.rollout.prompt_index
    (sequence_weights, entropy_weights), (length_weights, _) = (  # the length's gradient has no ∂h term
        surrogate_weights(scores.entropies, scores.mask, index, target, ratios=ratios)
        for target in ("sequence", "length")
    )
    logp_weights = [sequence_weights - level * length_weights, sequence_weights][: 1 + settings.per_sequence]
    return [LossWeights(weights, entropy_weights) for weights in logp_weights]


def send_fold_gradients(
    batch: Batch,
    passes: Passes,
    losses: Sequence[LossWeights],
    settings: EntropySettings,
    check: ScoreCheck,
    receiver_of: Callable[[int, range], Receiver],
) -> None:
    """Compute the entropy gradient X of each fold, and hand it on bucket by bucket as it arrives. Collective.

    It runs a small forward pass over some responses of each prompt, and one backward for each X. `.grad` and the
    training loop's own reduction are not touched.

    Args:
        batch: The batch of the step.
        passes: The policy, the ranks and the reduction that sums gradients by fold.
        losses: From `entropy_losses`, one for each denominator.
        settings: How many responses of each prompt to use.
        check: Receives all scores that X is calculated from.
        receiver_of: Returns what takes the X of a denominator's index and these folds, the mean over a fold's
            responses.
    """
    num_chosen = min(settings.responses_per_prompt, batch.responses_per_prompt)
    is_chosen = response_index(batch.rollout.prompt_index) < num_chosen
    sizes = batch.fold_sizes.to(batch.fold.device)
    shares = (batch.responses_per_prompt / num_chosen / sizes[batch.fold]).unsqueeze(1)
    weightings = Weightings(losses, shares, on_scores=check.compare, varentropy=check.is_tested)
    with passes.reduction.shard.gathered_once() if settings.keep_gathered else nullcontext():
        passes.send_gradients(batch, weightings, receiver_of, is_chosen)

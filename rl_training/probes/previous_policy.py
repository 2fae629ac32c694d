"""Compares the policy before a step with the one after it, on responses sampled after the step. Pure functions.

Responses t ~ π, the policy after the step, are scored under π and under π', the policy before it. With prefix ratios

    ρ_k = Π_{j<k} π'(t_j) / π(t_j),      Δ_k = ρ_{k+1} − ρ_k,      w = ρ after the last token

and the exact entropies h' under π',

    H' − H = E[ Σ_k ρ_k h'_k − h_k − Δ_k b_k ]                nats per sequence
    T' − T = E[ Σ_k ρ_k − 1 − Δ_k b_k ]                       tokens
    r' − r = E[ (w − 1)(r − b) ]                              reward per response
    KL(π|π') = E[ Σ_k (ratio_k − 1 − log ratio_k) ]           nats per sequence, never negative

These are exact for steps of any size. E[Δ_k | prefix] = 0 under π, so any baseline b that does not depend on token k
or later ones keeps the estimates unbiased. b_k is the mean entropy (number of tokens) still to come over the OTHER
responses to the prompt, as in entropy/weights.py. So to first order in the step, H' − H is the product of that entropy
gradient with the step. Self-normalised weights over the few responses to a prompt would shrink the change by a tenth.

If another policy μ sampled the responses, 1 and ρ_k become the prefix ratios of π and of π' to μ.

`changes_of_sums` turns sums over responses into these changes, so that sums without one prompt give their jackknife.

Sources: Precup, Sutton & Singh 2000 (per-decision weights); Schulman 2020, "Approximating KL divergence" (k3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.entropy.weights import sums_after, sums_before, surrogate_weights
from rl_training.policy.rollout import centre_by_prompt
from rl_training.policy.scores import Scores

NUM_LEVELS, NUM_TERMS = 3, 7  # columns of `sums_of_responses` before those of the rewards


def differences_before(
    scores: Scores, before: Scores, rows: Tensor, prompt_index: Tensor, rewards: Tensor, log_ratios: Tensor
) -> Tensor:
    """Return what some responses contribute to H' − H, T' − T, KL(π|π') and r' − r.

    Args:
        scores: Scores of all responses under the policy after the step.
        before: Scores of `rows` under the policy before the step, in the same columns.
        rows: Indices of responses, (B',).
        prompt_index: Equal for responses to the same prompt, (B,). Each prompt needs at least two responses.
        rewards: (B, R), of R reward functions. A response's term of r' − r is 0 if its reward is nan, or the only one
            of its prompt.
        log_ratios: log π − log μ of each token, (B, T); 0 if the policy itself sampled.

    Returns:
        (B', 4 + R) fp64: the terms of H' − H, T' − T and KL, log w, and the terms of each r' − r.

    Example: a prompt has two responses of one token each, with h = 1 and rewards 1 and 0. The first has h' = 3 and was
    twice as likely before the step. Its terms are 2, 0 and 2 − 1 − log 2, log w = log 2, and (2 − 1)(1 − 0).
    """
    exact = scores.exact()
    exact_before = before.exact()
    mask = exact.mask
    entropies = exact.entropies
    mask_of_rows = mask[rows]
    entropy = entropies[rows]
    log_step = exact_before.logps - exact.logps[rows]
    (prefix, log_full, ratio_change), (prefix_before, log_full_before, ratio_change_before) = (
        _prefix_ratios(logs) for logs in (log_ratios[rows], log_ratios[rows] + log_step)
    )
    centred_costs = [surrogate_weights(entropies, mask, prompt_index, "sequence")[0]]
    centred_costs += [surrogate_weights(entropies, mask, prompt_index, "length")[0]]
    entropy_baseline, length_baseline = (
        ((ratio_change_before - ratio_change) * (sums_after(costs) - weights)[rows]).sum(dim=1)
        for costs, weights in zip((entropies, mask), centred_costs, strict=True)
    )
    more_likely = log_full_before.exp() - log_full.exp()
    columns = [
        (prefix_before * exact_before.entropies - prefix * entropy).sum(dim=1) - entropy_baseline,
        ((prefix_before - prefix) * mask_of_rows).sum(dim=1) - length_baseline,
        ((prefix + ratio_change) * (log_step.expm1() - log_step)).sum(dim=1),
        log_full_before,
        *(more_likely * _above_others(reward.double(), prompt_index)[rows] for reward in rewards.unbind(dim=1)),
    ]
    return torch.stack(columns, dim=1)


def have_others(rewards: Tensor, prompt_index: Tensor) -> Tensor:
    """Return whether a response and another one to its prompt have each reward, (B, R) bool, for (B, R) rewards."""
    sizes = torch.stack([centre_by_prompt(reward, prompt_index)[1] for reward in rewards.unbind(dim=1)], dim=1)
    return ~rewards.isnan() & (sizes > 1)


def sums_of_responses(scores: Scores, rows: Tensor, terms: Tensor, logs: Tensor, is_rewarded: Tensor) -> Tensor:
    """Return what each response adds to the sums of `changes_of_sums`, (B, 10 + 2 R).

    Args:
        scores: Scores of all responses under the policy after the step.
        rows: Indices of the responses that were scored again, (B',).
        terms: Their terms from `differences_before`, (B', 4 + R).
        logs: log π − log μ of each token, (B, T).
        is_rewarded: Whether the response and another one to its prompt have each reward, (B, R).
    """
    exact = scores.exact()
    weights = exact.mask * sums_before(logs).exp()  # of tokens; 1 if the policy itself sampled
    entropies = (weights * exact.entropies).sum(dim=1)
    lengths = weights.sum(dim=1)
    entropy_change, length_change, kl, log_importance = terms[:, :4].unbind(dim=1)
    importance = log_importance.exp()
    columns = [
        torch.ones_like(importance),
        entropy_change,
        length_change,
        kl,
        lengths[rows],
        importance,
        importance.square(),
        *terms[:, 4:].unbind(dim=1),
        *is_rewarded[rows].to(importance).unbind(dim=1),
    ]
    scored = terms.new_zeros(len(lengths), len(columns))
    scored[rows] = torch.stack(columns, dim=1)
    return torch.cat([torch.stack([torch.ones_like(lengths), entropies, lengths], dim=1), scored], dim=1)


def changes_of_sums(sums: Tensor) -> Tensor:
    """Return the changes, the KL divergence per token and the effective sample size as a share, (…, 5 + R).

    The changes are those of entropy per token and per sequence, of length, and of each reward.
    """
    level_sums, scored = sums[..., :NUM_LEVELS], sums[..., NUM_LEVELS:]
    scored = scored / scored[..., :1]
    entropy, length = (level_sums[..., 1:] / level_sums[..., :1]).unbind(-1)
    _, entropy_change, length_change, kl, tokens, weight, weight_square = scored[..., :NUM_TERMS].unbind(-1)
    reward_change, rewarded = scored[..., NUM_TERMS:].chunk(2, dim=-1)
    per_token = entropy / length - (entropy + entropy_change) / (length + length_change)
    changes = torch.stack([per_token, -entropy_change, -length_change], dim=-1)
    others = torch.stack([kl / tokens, weight.square() / weight_square], dim=-1)
    return torch.cat([changes, -reward_change / rewarded, others], dim=-1)


def _above_others(rewards: Tensor, prompt_index: Tensor) -> Tensor:
    """Return each reward minus the mean of the prompt's other rewards, (B,); 0 if it or all of the others are nan."""
    centred, sizes = centre_by_prompt(rewards, prompt_index)
    return (centred * sizes / (sizes - 1.0)).where(~rewards.isnan() & (sizes > 1), 0.0)


def _prefix_ratios(logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ρ before each token, (B, T), log ρ after the last token, (B,), and each token's change of ρ, (B, T)."""
    before = sums_before(logs).exp()
    return before, logs.sum(dim=1), before * logs.expm1()

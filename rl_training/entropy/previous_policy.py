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

Sources: Precup, Sutton & Singh 2000 (per-decision weights); Schulman 2020, "Approximating KL divergence" (k3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.entropy.weights import sums_after, sums_before, surrogate_weights
from rl_training.policy.rollout import centre_by_prompt
from rl_training.policy.scores import Scores


def differences_before(
    scores: Scores, before: Scores, rows: Tensor, prompt_index: Tensor, rewards: Tensor, log_ratios: Tensor
) -> Tensor:
    """Return the terms of H' − H, T' − T, r' − r and KL(π|π'), and log w, of some responses.

    Args:
        scores: Scores of all responses under the policy after the step.
        before: Scores of `rows` under the policy before the step, in the same columns.
        rows: Indices of responses, (B',).
        prompt_index: Equal for responses to the same prompt, (B,). Each prompt needs at least two responses.
        rewards: (B,). A response's term of r' − r is 0 if its reward is nan, or the only one of its prompt.
        log_ratios: log π − log μ of each token, (B, T); 0 if the policy itself sampled.

    Returns:
        (B', 5) fp64.

    Example: a prompt has two responses of one token each, with h = 1 and rewards 1 and 0. The first has h' = 3 and was
    twice as likely before the step. Its terms are 2, 0, (2 − 1)(1 − 0) and 2 − 1 − log 2, and log w = log 2.
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
    centred_rewards, sizes = centre_by_prompt(rewards.double(), prompt_index)
    advantages = (centred_rewards * sizes / (sizes - 1.0)).where(~rewards.isnan() & (sizes > 1), 0.0)
    columns = [
        (prefix_before * exact_before.entropies - prefix * entropy).sum(dim=1) - entropy_baseline,
        ((prefix_before - prefix) * mask_of_rows).sum(dim=1) - length_baseline,
        (log_full_before.exp() - log_full.exp()) * advantages[rows],
        ((prefix + ratio_change) * (log_step.expm1() - log_step)).sum(dim=1),
        log_full_before,
    ]
    return torch.stack(columns, dim=1)


def _prefix_ratios(logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ρ before each token, (B, T), log ρ after the last token, (B,), and each token's change of ρ, (B, T)."""
    before = sums_before(logs).exp()
    return before, logs.sum(dim=1), before * logs.expm1()

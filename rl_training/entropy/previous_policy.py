"""The policy before a step compared with the one after it, from responses that were sampled after. Pure functions.

Responses t ~ π, the policy after the step, scored under π and under π', the policy before. With the ratios of prefixes

    ρ_k = Π_{j<k} π'(t_j) / π(t_j),      Δ_k = ρ_{k+1} − ρ_k,      w = ρ after the last token

and h' the exact entropies under π',

    H' − H = E[ Σ_k ρ_k h'_k − h_k − Δ_k b_k ]                nats per sequence
    T' − T = E[ Σ_k ρ_k − 1 − Δ_k b_k ]                       tokens
    r' − r = E[ (w − 1)(r − b) ]                              of the reward r
    KL(π|π') = E[ Σ_k (ratio_k − 1 − log ratio_k) ]           nats per sequence, never below 0

exact for steps of any size. E[Δ_k | prefix] = 0 under π, so that any baseline b that does not depend on the token and
what follows leaves them unbiased. It is the mean of the entropies (tokens) still to come over the OTHER responses of
the prompt, as in entropy.py: to first order in the step H' − H is the product of that entropy gradient with it. Weights
that are normalised by their own sum over the few responses of a prompt would shrink the change by a tenth.

Where the responses come from another sampler μ, 1 and ρ_k become the ratios of prefixes under π and π' to μ.

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
    """Return some responses' terms of H' − H, T' − T, r' − r and KL(π|π'), and log w.

    Args:
        scores: of all responses, under the policy after the step.
        before: of `rows`, under the policy before the step, in the same columns.
        rows: (B',), indices of responses.
        prompt_index: (B,), equal for responses to the same prompt, of which there are at least two.
        rewards: (B,). The term of r' − r is 0 for a response whose reward is nan, or is its prompt's only one.
        log_ratios: (B, T), log π − log μ of each token; 0 where the policy itself sampled.

    Returns:
        (B', 5) fp64.

    Example: of two responses to one prompt, each of one token with h = 1 and with rewards 1 and 0, the first has
    h' = 3 and is twice as likely before: its terms are 2, 0, (2 − 1)(1 − 0) and 2 − 1 − log 2; log w = log 2.
    """
    exact = scores.exact()
    exact_before = before.exact()
    mask = exact.mask
    entropies = exact.entropies
    real = mask[rows]
    entropy = entropies[rows]
    log_step = exact_before.logps - exact.logps[rows]
    (prefix, last, moves), (prefix_before, last_before, moves_before) = (
        _prefix_ratios(logs) for logs in (log_ratios[rows], log_ratios[rows] + log_step)
    )
    centred = [surrogate_weights(entropies, mask, prompt_index, "sequence")[0]]
    centred += [surrogate_weights(entropies, mask, prompt_index, "length")[0]]
    of_entropy, of_length = (
        ((moves_before - moves) * (sums_after(costs) - weights)[rows]).sum(dim=1)
        for costs, weights in zip((entropies, mask), centred, strict=True)
    )
    above, sizes = centre_by_prompt(rewards.double(), prompt_index)
    above_others = (above * sizes / (sizes - 1.0)).where(~rewards.isnan() & (sizes > 1), 0.0)
    columns = [
        (prefix_before * exact_before.entropies - prefix * entropy).sum(dim=1) - of_entropy,
        ((prefix_before - prefix) * real).sum(dim=1) - of_length,
        (last_before.exp() - last.exp()) * above_others[rows],
        ((prefix + moves) * (log_step.expm1() - log_step)).sum(dim=1),
        last_before,
    ]
    return torch.stack(columns, dim=1)


def _prefix_ratios(logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ρ before each token, (B, T), log ρ after the last one, (B,), and the change of ρ by each token, (B, T)."""
    before = sums_before(logs).exp()
    return before, logs.sum(dim=1), before * logs.expm1()

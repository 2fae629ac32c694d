"""The gradient of the policy's entropy, as weights on log-probabilities and entropies. Pure functions.

With S = Σ_k log π(t_k) the log-probability of a response t of T tokens and h_k the exact entropy of the next-token
distribution at its k-th prefix, the sequence entropy is

    H_seq = E[−S] = E[Σ_k h_k]                          nats per sequence,
    H_tok = E[Σ_k h_k] / E[T]                           nats per token (a ratio of means).

Differentiating E[Σ_k h_k] gives two terms: the entropies themselves change, and so do the prefixes that are visited.
The estimate is a mean over sequences of  Σ_k w_k ∂log π(t_k) + u_k ∂h_k  with detached weights:

    entropy  w_k = R_k − loo_k(R),     u_k = 1    R_k = Σ_{j>k} h_j, the entropy still to come
    length   w_k = (T−k) − loo_k(T−k), u_k = 0    ∂E[T], for H_tok and for its own sake

loo_k is the mean over the OTHER responses of the same prompt that are still alive at k, 0 if none is.
Leaving oneself out matters: a mean that includes the response itself shrinks the estimate by (G−1)/G. Dropping the w
term altogether — the gradient of the mean measured entropy — is biased: it ignores that the visited prefixes change.
Where each sequence answers a prompt of its own, the baseline is the mean over all other sequences. It predicts less,
but is just as independent of the response, so the estimate stays unbiased. Copies of one response are not independent.

Over several turns an environment (a tool, a user) answers between the policy's tokens. What it writes does not depend
on the parameters given what came before. So the same forms hold with k and j over the policy's tokens only, and E
includes the environment's randomness: docs/explanation/theory.md.

Source: the score-function identity with reward-to-go h and a leave-one-out baseline (Kool et al. 2019, "Buy 4
REINFORCE samples, get a baseline for free"); the Rao-Blackwell step replaces −log π(t_k) by its mean h_k. The classic
−E[(S − S̄) ∂S] needs sixteen times the sequences for the same error: benchmarks/README.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rl_training.mathematics.jackknife import unchanged

Target = Literal["sequence", "token", "length"]
Baseline = Literal["prompt", "buffer"]


def surrogate_weights(
    entropies: Tensor,
    mask: Tensor,
    prompt_index: Tensor,
    target: Target = "sequence",
    baseline: Baseline = "prompt",
    reduce: Callable[[Tensor], Tensor] = unchanged,
) -> tuple[Tensor, Tensor]:
    """Returns (logp_weights, entropy_weights), both (B, T), detached, zero where mask is 0.

    The entropy gradient is the gradient of
        mean over the B sequences of Σ_k logp_weights·logps + entropy_weights·entropies.

    entropies     (B, T) nats, of the distributions that the tokens were sampled from
    mask          (B, T) 1 on sampled tokens. Between them an environment may have written others: positions, and who is
                  alive at them, count the policy's tokens only
    prompt_index  (B,)   equal for the responses of one prompt; each prompt needs at least two
    target        "sequence": ∂H_seq; "token": ∂H_tok, already divided by the batch's mean length; "length": ∂E[T]
    baseline      the mean over the other responses of the "prompt", or over all others of the "buffer", whose sequences
                  must be independent given their prompts; `prompt_index` then does not matter
    reduce        with the buffer: sums a tensor over the processes that hold it, in tables of one width; all means are
                  then over all of them

    Raises ValueError when a prompt, or the buffer, has a single response: there is no leave-one-out baseline then.
    """
    if baseline not in ("prompt", "buffer"):
        raise ValueError(f"unknown baseline {baseline!r}: choose 'prompt' or 'buffer'")
    order = (mask == 0).long().argsort(dim=1, stable=True)  # of columns: the policy's tokens first, in their order
    real, mask = mask.bool().gather(1, order), mask.to(entropies.dtype).gather(1, order)
    entropies = entropies.detach().gather(1, order).masked_fill(~real, 0.0)  # 0·inf is nan
    group = _group_ids(prompt_index if baseline == "prompt" else torch.zeros_like(prompt_index), reduce)
    costs, entropy_weights = _costs(target, entropies, mask, reduce)
    costs = costs * mask
    to_go = (running_sum(costs.flip(1)).flip(1) - costs) * mask  # strictly after k
    weights = (to_go - _leave_one_out_mean(to_go, mask, group, reduce)) * mask
    weights, entropy_weights = (torch.zeros_like(w).scatter(1, order, w) for w in (weights, entropy_weights))
    return weights, entropy_weights


def running_sum(values: Tensor) -> Tensor:
    """Returns the sums of (B, T) values up to each position.

    On the CPU where torch may use deterministic algorithms only: it has none for this on a GPU, and would raise.
    """
    place = "cpu" if torch.are_deterministic_algorithms_enabled() else values.device
    return values.to(place).cumsum(dim=1).to(values.device)


def _costs(
    target: Target, entropies: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns what a token is expected to add to the target before it is sampled, and the weight of its entropy."""
    if target == "sequence":
        return entropies, mask
    if target == "length":
        return mask, torch.zeros_like(mask)
    if target != "token":
        raise ValueError(f"unknown target {target!r}: choose 'sequence', 'token' or 'length'")
    # ∂H_tok = (∂H_seq − H_tok ∂E[T]) / E[T]: the cost of a token is its entropy above the mean.
    count = mask.new_tensor(float(len(mask)))
    length, entropy, count = reduce(torch.stack([mask.sum(), (entropies * mask).sum(), count])).unbind()
    mean_length, level = length / count, entropy / length
    return (entropies - level) / mean_length, mask / mean_length


def _group_ids(prompt_index: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns prompt_index renumbered 0 .. number of prompts − 1, after checking that each prompt has two responses."""
    _, group, sizes = prompt_index.unique(return_inverse=True, return_counts=True)
    if int(reduce(sizes.double()).min()) < 2:
        raise ValueError(
            "a prompt has a single response: the entropy gradient needs a leave-one-out baseline. "
            "Sample at least two responses per prompt (num_generations >= 2), or take the baseline from all other "
            "sequences (baseline='buffer')."
        )
    return group


def _leave_one_out_mean(values: Tensor, alive: Tensor, group: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns, for each (sequence, position), the mean of `values` over the other alive members of its group, or 0."""
    num_groups = int(group.max()) + 1
    sums = values.new_zeros(num_groups, values.shape[1]).index_add_(0, group, values * alive)
    counts = values.new_zeros(num_groups, values.shape[1]).index_add_(0, group, alive)
    sums, counts = reduce(torch.stack([sums, counts])).unbind()
    other_sums = sums[group] - values * alive
    other_counts = counts[group] - alive
    return torch.where(other_counts > 0, other_sums / other_counts.clamp(min=1), 0.0)

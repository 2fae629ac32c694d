"""The gradient of the policy's entropy, as weights on log-probabilities and entropies. Pure functions.

With S = Σ_k log π(t_k) the log-probability of a response t of T tokens and h_k the exact entropy of the next-token
distribution at its k-th prefix, the sequence entropy is

    H_seq = E[−S] = E[Σ_k h_k]                          nats per sequence,
    H_tok = E[Σ_k h_k] / E[T]                           nats per token (a ratio of means).

Differentiating E[Σ_k h_k] gives two terms: the entropies themselves change, and so do the prefixes that are visited.
The estimate is the mean over sequences of  Σ_k w_k ∂log π(t_k) + u_k ∂h_k  with detached weights:

    entropy  w_k = R_k − loo_k(R),     u_k = 1    R_k = Σ_{j>k} h_j, the entropy still to come
    length   w_k = (T−k) − loo_k(T−k), u_k = 0    estimates ∂E[T], which H_tok needs too

loo_k is the mean over the OTHER responses to the same prompt that are still alive at k, 0 if there are none.
The response itself must be left out: a mean that includes it shrinks the estimate by (G−1)/G. The w term must be there:
without it the estimate is the gradient of the mean measured entropy, which ignores that the visited prefixes change.
If every sequence answers a different prompt, baseline="buffer" takes the mean over all other sequences. It removes less
noise, but it does not depend on the response either, so the estimate stays unbiased. Copies of one response would break
this.

If another policy μ sampled the responses, costs and entropies are weighted by ρ_<k, the ratio π/μ of the tokens
before k, and the baseline by ρ_≤k, which includes token k (`prefix_ratios`; costs c_k = h_k, or 1 for the length):

    w_k = Σ_{j>k} ρ_<j c_j − ρ_≤k b_k,   u_k = ρ_<k,   b_k = Σ_others Σ_{j>k} ρ_<j c_j / Σ_others ρ_≤k

With all ρ = 1 these are the weights above. The weights for h minus H_tok times those for the length are the weights
for the centred costs h − H_tok. At a KL of 1e-3 per token, h alone has 3 to 150 times the noise of h − H_tok.

In multi-turn rollouts an environment (a tool, a user) writes between the policy's tokens. Given what came before, what
it writes does not depend on the parameters. So the formulas hold with k and j counting the policy's tokens only, and E
includes the environment's randomness: docs/explanation/theory.md.

Source: the score-function identity with reward-to-go h and a leave-one-out baseline (Kool et al. 2019, "Buy 4
REINFORCE samples, get a baseline for free"), Rao-Blackwellised: −log π(t_k) is replaced by its mean h_k. The classic
−E[(S − S̄) ∂S] needs sixteen times the sequences for the same error: benchmarks/README.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.statistics.jackknife import identity

Target = Literal["sequence", "token", "length"]
Baseline = Literal["prompt", "buffer"]


def prefix_ratios(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Return the ratios π/μ of all prefixes, (B, T + 1) fp64: column k has that of the policy's first k tokens.

    After its end, a sequence keeps its last ratio.

    Args:
        log_ratios: log π − log μ of each token, (B, T).
        mask: 1 on the tokens that count, (B, T).
    """
    logs = log_ratios.double().masked_fill(mask == 0, 0.0).gather(1, policy_first(mask))
    return nn.functional.pad(running_sum(logs), (1, 0)).exp()


def normalised_ratios(ratios: Tensor, reduce: Callable[[Tensor], Tensor] = identity) -> Tensor:
    """Divide the ratios of prefixes of each length by their mean over all N sequences, which is 1 in expectation.

    Args:
        ratios: As `prefix_ratios` returns them.
        reduce: Sums a tensor over the ranks that hold the sequences. Their tables must have the same width.
    """
    count = ratios.new_full((1,), float(len(ratios)))
    return ratios / (reduce(ratios.sum(dim=0)) / reduce(count))


def policy_first(mask: Tensor) -> Tensor:
    """Return each row's column order, (B, T), that moves columns with mask 1 to the front and keeps their order."""
    return (mask == 0).long().argsort(dim=1, stable=True)


def surrogate_weights(
    entropies: Tensor,
    mask: Tensor,
    prompt_index: Tensor,
    target: Target = "sequence",
    baseline: Baseline = "prompt",
    reduce: Callable[[Tensor], Tensor] = identity,
    ratios: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weights of the entropy gradient on log-probabilities and entropies.

    The entropy gradient is the gradient of
        mean over the B sequences of Σ_k logp_weights·logps + entropy_weights·entropies.

    Args:
        entropies: Entropies of the next-token distributions, (B, T) nats.
        mask: 1 on sampled tokens, (B, T). An environment may have written the tokens between them. Positions count the
            policy's tokens only, and so does whether a sequence is alive at a position.
        prompt_index: Equal for responses to the same prompt, (B,). Each prompt needs at least two responses.
        target: "sequence": ∂H_seq. "token": ∂H_tok, already divided by the batch's mean length. "length": ∂E[T].
        baseline: "prompt": the mean over the other responses to the prompt. "buffer": the mean over all other
            sequences, which must be independent given their prompts; `prompt_index` is then ignored.
        reduce: Sums a tensor over the ranks that hold the sequences, so that the means over all sequences (of "token",
            "buffer") are over all ranks. Their tables must have the same width. Each rank has all responses to its
            prompts.
        ratios: Ratios of prefixes if another policy sampled the sequences; at least T + 1 wide.

    Returns:
        (logp_weights, entropy_weights), (B, T) each, detached, 0 where mask is 0.

    Raises:
        UserError: A prompt, or the buffer, has a single response, so there is no leave-one-out baseline.
    """
    if baseline not in ("prompt", "buffer"):
        raise ValueError(f"unknown baseline {baseline!r}: choose 'prompt' or 'buffer'")
    order = policy_first(mask)
    dtype = entropies.dtype
    is_token = mask.bool().gather(1, order)
    mask = mask.to(entropies.dtype).gather(1, order)
    entropies = entropies.detach().gather(1, order).masked_fill(~is_token, 0.0)  # 0·inf is nan
    over_group = reduce if baseline == "buffer" else identity
    group = _group_ids(prompt_index if baseline == "prompt" else torch.zeros_like(prompt_index), over_group)
    width = mask.shape[1]
    ratios = torch.ones_like(mask[:, :1]).expand(-1, width + 1) if ratios is None else ratios[:, : width + 1]
    before = ratios[:, :-1]
    through = ratios[:, 1:]
    costs, entropy_weights = _costs(target, entropies, before * mask, reduce)
    to_go = sums_after(costs) * mask
    logp_weights = (to_go - through * _leave_one_out_mean(to_go, mask, through, group, over_group)) * mask
    logp_weights, entropy_weights = (
        torch.zeros_like(table).scatter(1, order, table).to(dtype) for table in (logp_weights, entropy_weights)
    )
    return logp_weights, entropy_weights


def running_sum(values: Tensor) -> Tensor:
    """Return the sums of (B, T) values up to and including each position.

    If torch is restricted to deterministic algorithms, the CPU calculates them: torch's cumsum has none on a GPU.
    """
    device = "cpu" if torch.are_deterministic_algorithms_enabled() else values.device
    return values.to(device).cumsum(dim=1).to(values.device)


def sums_before(values: Tensor) -> Tensor:
    """Return the sums of (B, T) values strictly before each position."""
    return running_sum(values) - values


def sums_after(values: Tensor) -> Tensor:
    """Return the sums of (B, T) values strictly after each position."""
    return running_sum(values.flip(1)).flip(1) - values


def _costs(
    target: Target, entropies: Tensor, ratios: Tensor, reduce: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return each token's cost, its expected contribution to the target before it is sampled, and its weight u_k.

    Args:
        target: The quantity whose gradient is wanted.
        entropies: (B, T).
        ratios: ρ_<k, 0 where there is no token, (B, T).
        reduce: Sums a tensor over ranks.
    """
    if target == "sequence":
        return entropies * ratios, ratios
    if target == "length":
        return ratios, torch.zeros_like(ratios)
    if target != "token":
        raise ValueError(f"unknown target {target!r}: choose 'sequence', 'token' or 'length'")
    # ∂H_tok = (∂H_seq − H_tok ∂E[T]) / E[T]: a token costs its entropy minus the mean.
    count = ratios.new_tensor(float(len(ratios)))
    length, entropy, count = reduce(torch.stack([ratios.sum(), (entropies * ratios).sum(), count])).unbind()
    mean_length = length / count
    level = entropy / length
    return (entropies - level) / mean_length * ratios, ratios / mean_length


def _group_ids(prompt_index: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Return prompt_index renumbered from 0 without gaps. Raise UserError if a prompt has a single response."""
    _, group, sizes = prompt_index.unique(return_inverse=True, return_counts=True)
    if int(reduce(sizes.double()).min()) < 2:
        raise UserError(
            "a prompt has a single response: the entropy gradient needs a leave-one-out baseline. "
            "Sample at least two responses per prompt (num_generations >= 2), or take the baseline from all other "
            "sequences (baseline='buffer')."
        )
    return group


def _leave_one_out_mean(
    values: Tensor, alive: Tensor, ratios: Tensor, group: Tensor, reduce: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return Σ values / Σ ratios over the other live members of each sequence's group, (B, T); 0 without any."""
    terms = torch.stack([(values * alive).to(ratios.dtype), ratios * alive, alive.to(ratios.dtype)], dim=1)
    table = terms.new_zeros(int(group.max()) + 1, *terms.shape[1:]).index_add_(0, group, terms)
    sum_others, ratios_others, count_others = (reduce(table)[group] - terms).unbind(dim=1)
    return torch.where(count_others > 0, sum_others / ratios_others, 0.0)

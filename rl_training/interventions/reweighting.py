"""The interventions on the loss: functions from the inputs of a loss (loss.py) and a strength to new weights.

c are the weights of log-probabilities and d those of entropies, A the advantages, ρ the ratios, m the mask of the
loss's tokens, M the number of the step's microbatches, and u = 1 / (b M L) the weight that Dr-GRPO's loss gives an
advantage of −1. named.py lists the interventions' strengths and requirements.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_training.interventions.loss import LossInputs
from rl_training.policy.rollout import centre_by_prompt
from rl_training.step.batch import Correction
from rl_training.step.loss_weights import LossWeights

STD_EPSILON = 1e-4  # TRL adds it to a group's standard deviation
MIN_SCALE = 0.02  # STEER's lower bound on the largest |Ω|, which sets the scale


def bonus(loss: LossInputs, strength: float) -> LossWeights:
    """Add an entropy bonus, the mean next-token entropy over the microbatch's tokens: d − β m / (M Σm).

    Source: Mnih et al. 2016, arXiv 1602.01783; TRL.
    """
    mask = loss.scores.mask.to(loss.scores.entropies)
    added = mask * (-strength / (loss.microbatches * mask.sum().clamp(min=1.0)))
    old = loss.weights.entropies
    return LossWeights(loss.weights.logps, added if old is None else old + added)


def psr(loss: LossInputs, strength: float) -> LossWeights:
    """Keep positive samples only: c where A > 0, else 0.

    Source: Zhu et al. 2025, arXiv 2506.01347.
    """
    return scaled(loss, (loss.advantages_of_tokens > 0).to(loss.weights.logps))


def nsr(loss: LossInputs, strength: float) -> LossWeights:
    """Keep negative samples only: c where A < 0, else 0.

    Source: Zhu et al. 2025, arXiv 2506.01347.
    """
    return scaled(loss, (loss.advantages_of_tokens < 0).to(loss.weights.logps))


def w_reinforce(loss: LossInputs, strength: float) -> LossWeights:
    """Weight positive samples less: λ c where A > 0, else c.

    Source: Zhu et al. 2025, arXiv 2506.01347.
    """
    is_positive = loss.advantages_of_tokens > 0
    return scaled(loss, torch.ones_like(is_positive, dtype=loss.weights.logps.dtype).masked_fill(is_positive, strength))


def std_norm(loss: LossInputs, strength: float) -> LossWeights:
    """Divide advantages by the standard deviation of their group's rewards: c / (s + 1e-4).

    Source: Shao et al. 2024, arXiv 2402.03300.
    """
    assert loss.rewards is not None
    prompts, group = loss.prompt_index.unique(return_inverse=True)
    deviations = torch.stack([_deviation(loss.rewards[group == g]) for g in range(len(prompts))])
    return scaled(loss, 1.0 / (deviations[group].unsqueeze(1) + STD_EPSILON))


def _deviation(rewards: Tensor) -> Tensor:
    """Return the standard deviation of the rewards that are not nan; 0 for fewer than two."""
    known_rewards = rewards[~rewards.isnan()].double()
    return known_rewards.std() if len(known_rewards) > 1 else known_rewards.new_zeros(())


def length_norm(loss: LossInputs, strength: float) -> LossWeights:
    """Average over the tokens of each response, as GRPO does: c L / T.

    Source: Shao et al. 2024, arXiv 2402.03300.
    """
    assert loss.settings is not None
    lengths = loss.scores.mask.sum(dim=1, keepdim=True).clamp(min=1)
    return scaled(loss, loss.settings.max_length / lengths)


def dynamic_sampling(loss: LossInputs, strength: float) -> LossWeights:
    """Replace prompts with zero advantages by prompts like the rest: c / (1 − share of replaced prompts).

    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476.
    """
    return LossWeights(loss.weights.logps / (1.0 - loss.zero_advantage_share), loss.weights.entropies)


def drop_truncated(loss: LossInputs, strength: float) -> LossWeights:
    """Leave out truncated responses: c where the response has ended, else 0.

    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476.
    """
    assert loss.truncated is not None
    return scaled(loss, (~loss.truncated).to(loss.weights.logps).unsqueeze(1))


def keep_truncated(loss: LossInputs, strength: float) -> LossWeights:
    """Include the truncated responses that the loss leaves out: c = −u (r − mean of the group's r) there.

    Source: Liu et al. 2025 (Dr-GRPO), arXiv 2503.20783.
    """
    assert loss.rewards is not None
    if loss.hidden is None:
        return loss.weights
    above = centre_by_prompt(loss.rewards, loss.prompt_index)[0].nan_to_num(nan=0.0)
    added = loss.hidden * (-loss.unit * above).unsqueeze(1)
    return LossWeights(loss.weights.logps + added.to(loss.weights.logps), loss.weights.entropies)


def clip_cov(loss: LossInputs, strength: float) -> LossWeights:
    """Leave out the share of tokens with the largest covariance of log-probability and advantage: c = 0 there.

    The paper's Clip-Cov draws tokens at random between bounds that depend on the scale of advantages. Here they are the
    tokens that KL-Cov takes, so that nothing is random.

    Source: Cui et al. 2025, arXiv 2505.22617.
    """
    return scaled(loss, 1.0 - _most_covariant(loss, strength).to(loss.weights.logps))


def kl_cov(loss: LossInputs, strength: float) -> LossWeights:
    """Penalise |log ρ| on the share of tokens that `clip_cov` takes: c + u sign(log ρ) there; c if all ρ are 1.

    Source: Cui et al. 2025, arXiv 2505.22617.
    """
    if loss.old_logps is None:
        return loss.weights
    penalty = loss.ratios.log().sign() * _most_covariant(loss, strength)
    return LossWeights(loss.weights.logps + loss.unit * penalty, loss.weights.entropies)


def top_entropy(loss: LossInputs, strength: float) -> LossWeights:
    """Keep only the share of tokens with the highest entropies: c there, else 0.

    Source: Wang et al. 2025, arXiv 2506.01939.
    """
    return scaled(loss, highest_entropies(loss, strength).to(loss.weights.logps))


def steer(loss: LossInputs, strength: float) -> LossWeights:
    """Downweight tokens with a large estimated change of entropy: c exp(−k |Ω|), Ω = ρ A (1 − π) (log π + h).

    k = −log λ / max(largest |Ω| of the microbatch, 0.02), so that every token keeps at least λ of its weight.

    Source: Hao et al. 2025, arXiv 2510.10150 and its code.
    """
    logps = loss.scores.logps
    mask = loss.scores.mask.bool()
    change = loss.ratios * loss.advantages_of_tokens * (1.0 - logps.exp()) * (logps + loss.scores.entropies)
    size = change.abs().masked_fill(~mask, 0.0)
    return scaled(loss, (math.log(strength) / size.max().clamp(min=MIN_SCALE) * size).exp())


def kl(loss: LossInputs, strength: float) -> LossWeights:
    """Add the divergence from the reference, ρ (e^x − x − 1) with x = log π_ref − log π: c − β u ρ x m.

    The factor ρ matters even where it is 1: without it, the gradient would be that of another divergence.

    Source: Liu et al. 2025, arXiv 2512.02556; TRL.
    """
    assert loss.reference_logps is not None
    distance = (loss.scores.logps - loss.reference_logps).masked_fill(loss.scores.mask == 0, 0.0)
    added = strength * loss.unit * loss.ratios * distance
    return LossWeights(loss.weights.logps + added.to(loss.weights.logps), loss.weights.entropies)


def clip_higher(loss: LossInputs, strength: float) -> LossWeights:
    """Clip ratios above at 1 + ε: c = −u ρ A where ρ is not clipped. It changes nothing if all ρ are 1.

    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476.
    """
    if loss.old_logps is None:
        return loss.weights
    assert loss.settings is not None
    return LossWeights(loss.dr_grpo_weights(loss.settings.correction, high=strength), loss.weights.entropies)


def no_correction(loss: LossInputs, strength: float) -> LossWeights:
    """Apply no correction for the sampler: c = −u ρ A, clipped.

    Source: plain Dr-GRPO.
    """
    return corrected(loss, None)


def token_truncation(loss: LossInputs, strength: float) -> LossWeights:
    """Multiply by token ratios to the sampler, truncated above: the c of `no_correction` times min(π/μ, C).

    Source: Yao et al. 2025, fengyao.notion.site/off-policy-rl; TRL.
    """
    return corrected(loss, Correction(high=strength))


def token_mask(loss: LossInputs, strength: float, low: float | None = None) -> LossWeights:
    """Leave out tokens with ratios outside [low, C], where low defaults to 1/C; multiply the others by their ratio.

    Source: Zhao et al. 2025 (IcePop); TRL.
    """
    return corrected(loss, Correction(masks=True, low=1.0 / strength if low is None else low, high=strength))


def sequence_mask(loss: LossInputs, strength: float) -> LossWeights:
    """Leave out responses whose ratio is above C; multiply all tokens of the others by their response's ratio.

    Source: Liu et al. 2025, richardli.xyz/rl-collapse; TRL.
    """
    return corrected(loss, Correction(per_sequence=True, masks=True, high=strength))


def exact(loss: LossInputs, strength: float) -> LossWeights:
    """Multiply all tokens by their response's ratio, which is unbiased and very noisy.

    Source: Precup, Sutton & Singh 2000.
    """
    return corrected(loss, Correction(per_sequence=True))


def ppo_clip(loss: LossInputs, strength: float) -> LossWeights:
    """Apply PPO's clip to the ratios to the sampler: c = −u A π/μ where they are not clipped.

    Source: Schulman et al. 2017, arXiv 1707.06347, on ratios to the sampler.
    """
    weights = loss.clipped(loss.log_sampler_ratios.exp(), strength, strength)
    return LossWeights(weights, loss.weights.entropies)


def corrected(loss: LossInputs, correction: Correction | None) -> LossWeights:
    """Return Dr-GRPO's weights with the given correction for the sampler instead of the loss's own."""
    return LossWeights(loss.dr_grpo_weights(correction), loss.weights.entropies)


def scaled(loss: LossInputs, factor: Tensor) -> LossWeights:
    """Return the weights factor · c and an unchanged d. `factor` is (b, T) or (b, 1)."""
    return LossWeights((loss.weights.logps * factor).to(loss.weights.logps), loss.weights.entropies)


def highest_entropies(loss: LossInputs, share: float) -> Tensor:
    """Return a mask, (b, T) bool, of the `share` of the microbatch's tokens with the highest entropies."""
    mask = loss.scores.mask.bool()
    entropies = loss.scores.entropies
    if not mask.any():
        return mask
    return (entropies >= torch.quantile(entropies[mask].float(), 1.0 - share)) & mask


def _most_covariant(loss: LossInputs, share: float) -> Tensor:
    """Return a mask, (b, T) bool, of the `share` of tokens with the largest (A − mean A)(log π − mean log π)."""
    mask = loss.scores.mask.bool()
    advantages = loss.advantages_of_tokens.expand(mask.shape)[mask].double()
    logps = loss.scores.logps[mask].double()
    covariances = (advantages - advantages.mean()) * (logps - logps.mean())
    chosen = torch.zeros_like(mask)
    if len(covariances):
        largest = torch.zeros_like(covariances, dtype=torch.bool)
        largest[covariances.topk(max(1, int(share * len(covariances)))).indices] = True
        chosen[mask] = largest
    return chosen

"""The input of an intervention: the weights, scores and settings of one microbatch's loss.

    ∂loss = Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik          (step/loss_weights.py)

The derivatives c and d, with respect to log-probabilities and entropies, define a loss. So an intervention is a
function from the loss's inputs to new c and d. It sees one microbatch, as training does: the tokens of highest entropy,
for example, are those of this rank's microbatch. The same functions predict (probes/interventions.py) and train
(hosts/trl/trained_loss.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.policy.rollout import Rollout, take_rows
from rl_training.policy.scores import Scores
from rl_training.step.batch import Batch, Correction, LossSettings
from rl_training.step.loss_weights import LossWeights

# Relative distance within which a loss's weights count as Dr-GRPO's: in bf16, ratios of 1 are rounded, and a few tokens
# may fall on the other side of a clip.
MAX_DEVIATION = 0.1
SIGN_TOLERANCE = 1e-6  # relative to the largest weight; smaller weights of the wrong sign are rounding


@dataclass(frozen=True)
class LossInputs:
    """The inputs of one microbatch's loss: b sequences of T tokens."""

    weights: LossWeights  # (b, T), of the unchanged loss
    scores: Scores  # (b, T), without graph; the mask is 1 on the tokens of the loss
    advantages: Tensor  # (b,), as the loss uses them: 0 for a hidden response, the mean if they differ by token
    prompt_index: Tensor  # (b,), equal for responses to the same prompt
    microbatches: float = 1  # this rank's sequences of the step, divided by b: the loss is a mean over all of them
    zero_advantage_share: float = 0.0  # share of the step's prompts, on all ranks, whose advantages are all 0
    settings: LossSettings | None = None  # None: unknown
    rewards: Tensor | None = None  # (b,)
    truncated: Tensor | None = None  # (b,), bool: cut off at the maximum length
    old_logps: Tensor | None = None  # (b, T), the denominators of the loss's ratios; None: all ratios are 1
    sampling_logps: Tensor | None = None  # (b, T), the sampler's; None: the policy itself sampled, or they are unknown
    reference_logps: Tensor | None = None  # (b, T), of a KL term's reference model
    hidden: Tensor | None = None  # (b, T), bool: the policy's tokens that the loss leaves out
    whole_prompts: bool = True  # whether the microbatch holds all responses to each of its prompts
    token_advantages: Tensor | None = None  # (b, T), if advantages differ within a response
    # Facts about the loss before any intervention, read from its weights rather than its settings.
    is_dr_grpo: bool = True  # the weights are Dr-GRPO's, with the clip and the sampler correction that are set
    is_of_advantages: bool = True  # the weights have the sign of −A, and are 0 where A is 0

    @property
    def advantages_of_tokens(self) -> Tensor:
        """A of each token, (b, T), or (b, 1) if all tokens of a response have the same."""
        return self.advantages.unsqueeze(1) if self.token_advantages is None else self.token_advantages

    @property
    def ratios(self) -> Tensor:
        """ρ = π / π_old of each token, (b, T); 1 on-policy and off the mask."""
        if self.old_logps is None:
            return torch.ones_like(self.scores.logps)
        difference = self.scores.logps - self.old_logps.to(self.scores.logps)
        return difference.masked_fill(self.scores.mask == 0, 0.0).exp()

    @property
    def log_sampler_ratios(self) -> Tensor:
        """The log ratio log(π_old/μ) of each token, (b, T), μ the sampler, π_old = π on-policy; 0 off the mask."""
        if self.sampling_logps is None:
            return torch.zeros_like(self.scores.logps)
        policy = self.scores.logps if self.old_logps is None else self.old_logps.to(self.scores.logps)
        difference = (policy - self.sampling_logps.to(policy)).masked_fill(self.scores.mask == 0, 0.0)
        return difference.nan_to_num(nan=0.0)  # as in TRL if vLLM returns no log-probability of a token

    @property
    def unit(self) -> float:
        """u, the weight that Dr-GRPO's loss gives a token of advantage −1 and ratio 1: 1 / (b · microbatches · L)."""
        assert self.settings is not None
        return 1.0 / (len(self.advantages) * self.microbatches * self.settings.max_length)

    def clipped(self, ratios: Tensor, low: float, high: float, factors: Tensor | None = None) -> Tensor:
        """Return Dr-GRPO's weights, (b, T): −u ρ A times `factors` where ρ is not clipped, else 0."""
        advantages = self.advantages_of_tokens
        passes = torch.where(advantages > 0, ratios <= 1.0 + high, ratios >= 1.0 - low)
        weights = -self.unit * ratios * advantages * passes * self.scores.mask * (1.0 if factors is None else factors)
        return weights.to(self.weights.logps)

    def dr_grpo_weights(self, correction: Correction | None, high: float | None = None) -> Tensor:
        """Return Dr-GRPO's weights, (b, T), with the given correction for the sampler.

        Ratios are clipped as set, or above at 1 + `high`.
        """
        assert self.settings is not None
        high = self.settings.epsilon_high if high is None else high
        factors = None if correction is None else correction.factors(self.log_sampler_ratios)
        return self.clipped(self.ratios, self.settings.epsilon_low, high, factors)

    def with_loss_facts(self) -> LossInputs:
        """Return the inputs with `is_dr_grpo` and `is_of_advantages` read from the weights."""
        weights = self.weights.logps.double()
        advantages = self.advantages_of_tokens.double()
        size = weights.abs().max() * advantages.abs().max()
        has_wrong_sign = (weights * advantages).clamp(min=0.0).max() > SIGN_TOLERANCE * size
        weighs_zero_advantages = weights.where(advantages == 0, 0.0).abs().max() > SIGN_TOLERANCE * weights.abs().max()
        is_dr_grpo = False
        if self.settings is not None:
            deviation = weights - self.dr_grpo_weights(self.settings.correction).double()
            is_dr_grpo = bool(deviation.norm() <= MAX_DEVIATION * weights.norm())
        return dataclasses.replace(
            self, is_dr_grpo=is_dr_grpo, is_of_advantages=not bool(has_wrong_sign | weighs_zero_advantages)
        )


Reweighting = Callable[[LossInputs, float], LossWeights]  # (the loss, strength) → new weights


def loss_inputs(
    batch: Batch, reduce: Callable[[Tensor], Tensor], reference_logps: Tensor | None = None
) -> list[LossInputs]:
    """Return the inputs of the loss for each microbatch of a step on this rank. Collective.

    Args:
        batch: The step's batch.
        reduce: Sums a tensor over ranks.
        reference_logps: Log-probabilities of the reference model, (B, T); None if unknown.

    Raises:
        UserError: If an off-policy step has no log-probabilities from sampling, so that its ratios are unknown.
    """
    rollout = dataclasses.replace(batch.rollout, images=None)
    scores = batch.scores.logps, batch.scores.entropies, batch.scores.mask
    zero_share = zero_advantage_share(rollout.advantages_of_tokens, rollout.prompt_index, reduce)
    parts = []
    for microbatch in batch.microbatch_rows:
        rows = torch.arange(microbatch.start, microbatch.stop, device=rollout.advantages.device)
        parts.append(
            microbatch_inputs(
                take_rows(rollout, rows),
                Scores(*(table[rows] for table in scores)),
                batch.loss_weights.of_rows(rows, batch.scores.mask.shape[1]),
                batch.loss_settings,
                None if reference_logps is None else reference_logps[rows],
                microbatches=rollout.num_sequences / len(rows),
                zero_advantage_share=zero_share,
                responses_per_prompt=batch.responses_per_prompt,
            )
        )
    # All ranks agree on these facts, so that they measure the same interventions.
    names = ("whole_prompts", "is_dr_grpo", "is_of_advantages")
    failures = [sum(not getattr(part, name) for part in parts) for name in names]
    counts = reduce(rollout.advantages.new_tensor(failures, dtype=torch.float64)).tolist()
    facts: dict[str, Any] = {name: not count for name, count in zip(names, counts, strict=True)}
    return [dataclasses.replace(part, **facts) for part in parts]


def microbatch_inputs(
    rollout: Rollout,
    scores: Scores,
    weights: LossWeights,
    settings: LossSettings | None,
    reference_logps: Tensor | None = None,
    *,
    microbatches: float = 1,
    zero_advantage_share: float = 0.0,
    responses_per_prompt: int | None = None,
) -> LossInputs:
    """Return the inputs of the loss for a microbatch, which by default is a whole step.

    Args:
        rollout: The microbatch's sequences.
        scores: Their scores, (b, T), without graph. The mask is 1 on all tokens of the policy, even on those that the
            loss hides.
        weights: The loss's weights, (b, T).
        settings: The loss's settings; None if unknown.
        reference_logps: Log-probabilities of the reference model, (b, T); None if unknown.
        microbatches: This rank's sequences of the step, divided by b.
        zero_advantage_share: Share of the step's prompts, on all ranks, whose advantages are all 0.
        responses_per_prompt: G; None: the microbatch holds all responses to each of its prompts.

    Raises:
        UserError: If an off-policy step has no log-probabilities from sampling, so that its ratios are unknown.
    """
    old_logps = (
        None if rollout.on_policy else rollout.sampling_logps if rollout.old_logps is None else rollout.old_logps
    )
    if rollout.has_unknown_sampler and old_logps is None:
        raise UserError("an off-policy step without sampling log-probabilities: its ratios are not known")
    mask = scores.mask
    whole_prompts = True
    if responses_per_prompt is not None:
        counts = rollout.prompt_index.unique(return_counts=True)[1]
        whole_prompts = bool((counts == responses_per_prompt).all())
    if settings is not None and settings.hides_truncated and rollout.truncated is not None:
        mask = mask * ~rollout.truncated.unsqueeze(1)
    inputs = LossInputs(
        weights=weights,
        scores=Scores(scores.logps, scores.entropies, mask),
        advantages=rollout.advantages,
        token_advantages=rollout.token_advantages,
        prompt_index=rollout.prompt_index,
        microbatches=microbatches,
        zero_advantage_share=zero_advantage_share,
        settings=settings,
        rewards=rollout.rewards,
        truncated=rollout.truncated,
        old_logps=old_logps,
        sampling_logps=rollout.sampling_logps,
        reference_logps=reference_logps,
        hidden=(scores.mask != 0) & (mask == 0),
        whole_prompts=whole_prompts,
    )
    return inputs.with_loss_facts()


def zero_advantage_share(advantages: Tensor, prompt_index: Tensor, reduce: Callable[[Tensor], Tensor]) -> float:
    """Return the share of prompts, over all ranks, whose responses all have advantage 0. Collective.

    Args:
        advantages: Advantages of responses or of their tokens, (b, …).
        prompt_index: Equal for responses to the same prompt, (b,).
        reduce: Sums a tensor over ranks.

    >>> zero_advantage_share(torch.tensor([0.0, 0.5, 0.0, 0.0]), torch.tensor([1, 2, 3, 4]), lambda x: x)
    0.75
    """
    prompts, group = prompt_index.unique(return_inverse=True)
    sizes = advantages.new_zeros(len(prompts), dtype=torch.float64)
    sizes.index_add_(0, group, advantages.abs().double().view(len(advantages), -1).sum(dim=1))
    num_zero, count = reduce(torch.stack([(sizes == 0).sum().double(), sizes.new_tensor(float(len(sizes)))])).tolist()
    return num_zero / count

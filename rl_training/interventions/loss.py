"""The input of an intervention: what the loss of one microbatch knows.

    ∂loss = Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik          (gradients/loss_weights.py)

A loss is given by its derivatives with respect to log-probabilities and entropies. So an intervention is a function
from the loss's inputs to new c and d. Its unit is a microbatch, as in training: the tokens of highest entropy, for
example, are those of this rank's microbatch. The same functions predict (probes/interventions.py) and train
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
from rl_training.gradients.loss_weights import LossWeights
from rl_training.policy.rollout import Rollout, take_rows
from rl_training.policy.scores import Scores
from rl_training.step.batch import Batch, Correction, LossSettings

DR_GRPO = 0.1  # of the norm of the loss's weights: what bf16 makes of ratios that are 1, and a few tokens at a clip
SIGNS = 1e-6  # of the largest weight: what rounding may leave


@dataclass(frozen=True)
class LossInputs:
    """What the loss of one microbatch knows: b sequences of T tokens."""

    weights: LossWeights  # (b, T), of the loss as it is
    scores: Scores  # (b, T), without graph; the mask is 1 on the tokens of the loss
    advantages: Tensor  # (b,), as the loss weighs them: 0 for a response that it hides; of unlike tokens the mean
    prompt_index: Tensor  # (b,), equal for responses of the same prompt
    microbatches: float = 1  # sequences of this step on this rank, over b: the loss is a mean over all of them
    zero_advantage_share: float = 0.0  # of the step's prompts, on all ranks: those whose advantages are all 0
    settings: LossSettings | None = None  # None where they are not known
    rewards: Tensor | None = None  # (b,)
    truncated: Tensor | None = None  # (b,), bool: cut off at the maximum length
    old_logps: Tensor | None = None  # (b, T), of the loss's ratios; None where all of these are 1
    sampling_logps: Tensor | None = None  # (b, T), the sampler's; None where it is this very policy, or not known
    reference_logps: Tensor | None = None  # (b, T), of the reference model of a KL term
    hidden: Tensor | None = None  # (b, T), bool: the policy's tokens that the loss does not see
    whole_prompts: bool = True  # it has all responses to each of its prompts
    token_advantages: Tensor | None = None  # (b, T), where they differ within a response
    # What the weights say of the loss, whatever its settings are, before any intervention.
    is_dr_grpo: bool = True  # they are Dr-GRPO's, with the clip and the correction for a sampler that are set
    is_of_advantages: bool = True  # they have the signs of advantages, and are 0 where these are

    @property
    def advantages_of_tokens(self) -> Tensor:
        """A of each token, (b, T), or (b, 1) where all of a response have the same."""
        return self.advantages.unsqueeze(1) if self.token_advantages is None else self.token_advantages

    @property
    def ratios(self) -> Tensor:
        """ρ = π / π_old of each token, (b, T); 1 on-policy, and where the loss has no token."""
        if self.old_logps is None:
            return torch.ones_like(self.scores.logps)
        difference = self.scores.logps - self.old_logps.to(self.scores.logps)
        return difference.masked_fill(self.scores.mask == 0, 0.0).exp()

    @property
    def log_sampler_ratios(self) -> Tensor:
        """log π_old − log μ of each token, (b, T), μ the sampler's, π_old = π on-policy; 0 where the loss has none."""
        if self.sampling_logps is None:
            return torch.zeros_like(self.scores.logps)
        policy = self.scores.logps if self.old_logps is None else self.old_logps.to(self.scores.logps)
        difference = (policy - self.sampling_logps.to(policy)).masked_fill(self.scores.mask == 0, 0.0)
        return difference.nan_to_num(nan=0.0)  # as TRL does where vLLM knows no log-probability of a token

    @property
    def unit(self) -> float:
        """What Dr-GRPO's loss hands back to a token of advantage −1 and ratio 1: 1 / (b · microbatches · L)."""
        assert self.settings is not None
        return 1.0 / (len(self.advantages) * self.microbatches * self.settings.max_length)

    def clipped(self, ratios: Tensor, low: float, high: float, factors: Tensor | None = None) -> Tensor:
        """Return Dr-GRPO's weights, −u ρ A where the clip lets ρ through, times factors, (b, T)."""
        advantages = self.advantages_of_tokens
        passes = torch.where(advantages > 0, ratios <= 1.0 + high, ratios >= 1.0 - low)
        weights = -self.unit * ratios * advantages * passes * self.scores.mask * (1.0 if factors is None else factors)
        return weights.to(self.weights.logps)

    def corrected(self, correction: Correction | None) -> Tensor:
        """Return Dr-GRPO's weights as they are set, but with this correction for the sampler, (b, T)."""
        assert self.settings is not None
        factors = None if correction is None else correction.factors(self.log_sampler_ratios)
        return self.clipped(self.ratios, self.settings.epsilon_low, self.settings.epsilon_high, factors)

    def compared(self) -> LossInputs:
        """Return the same, with what its weights say of the loss."""
        weights = self.weights.logps.double()
        advantages = self.advantages_of_tokens.double()
        size = weights.abs().max() * advantages.abs().max()
        against = (weights * advantages).clamp(min=0.0).max() > SIGNS * size
        beside = weights.where(advantages == 0, 0.0).abs().max() > SIGNS * weights.abs().max()
        is_dr_grpo = False
        if self.settings is not None:
            off = weights - self.corrected(self.settings.correction).double()
            is_dr_grpo = bool(off.norm() <= DR_GRPO * weights.norm())
        return dataclasses.replace(self, is_dr_grpo=is_dr_grpo, is_of_advantages=not bool(against | beside))


Function = Callable[[LossInputs, float], LossWeights]


def loss_inputs(
    batch: Batch, reduce: Callable[[Tensor], Tensor], reference_logps: Tensor | None = None
) -> list[LossInputs]:
    """Return what the loss knew of each microbatch of a step on this rank. A collective.

    reference_logps  (B, T), where they are known

    ValueError off-policy without log-probabilities at sampling: the ratios are not known.
    """
    rollout = dataclasses.replace(batch.rollout, images=None)
    scores = vars(batch.scores).values()
    silent = zero_advantage_share(rollout.advantages_of_tokens, rollout.prompt_index, reduce)
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
                zero_advantage_share=silent,
                responses_per_prompt=batch.responses_per_prompt,
            )
        )
    # The same on all ranks, which then measure the same interventions.
    names = ("whole_prompts", "is_dr_grpo", "is_of_advantages")
    against = [sum(not getattr(part, name) for part in parts) for name in names]
    of_all = reduce(rollout.advantages.new_tensor(against, dtype=torch.float64)).tolist()
    facts: dict[str, Any] = {name: not count for name, count in zip(names, of_all, strict=True)}
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
    """Return what the loss knows of a microbatch; by default one that is a whole step.

    scores                (b, T), without graph; the mask is 1 on the policy's tokens, those that the loss hides too
    responses_per_prompt  None: it has all of each

    ValueError off-policy without log-probabilities at sampling: the ratios are not known.
    """
    old_logps = (
        None if rollout.on_policy else rollout.sampling_logps if rollout.old_logps is None else rollout.old_logps
    )
    if not rollout.on_policy and old_logps is None:
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
    return inputs.compared()


def zero_advantage_share(advantages: Tensor, prompt_index: Tensor, reduce: Callable[[Tensor], Tensor]) -> float:
    """Return the share of the prompts, over all ranks, whose responses all have the advantage 0. A collective.

    advantages  (b, …), of responses or of their tokens

    >>> zero_advantage_share(torch.tensor([0.0, 0.5, 0.0, 0.0]), torch.tensor([1, 2, 3, 4]), lambda x: x)
    0.75
    """
    prompts, group = prompt_index.unique(return_inverse=True)
    sizes = advantages.new_zeros(len(prompts), dtype=torch.float64)
    sizes.index_add_(0, group, advantages.abs().double().view(len(advantages), -1).sum(dim=1))
    silent, count = reduce(torch.stack([(sizes == 0).sum().double(), sizes.new_tensor(float(len(sizes)))])).tolist()
    return silent / count

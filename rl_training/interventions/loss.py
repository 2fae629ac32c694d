"""What an intervention is a function of, and what it returns: the loss of one microbatch, and its new weights.

    ∂loss = Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik          (engine/loss_weights.py)

A loss is what it hands back to log-probabilities and to entropies. So an intervention on it is a function from what
the loss knows to new c and d. Its unit is a microbatch, as in training: the tokens of highest entropy, for example, are
those of this rank's microbatch. So far the functions serve predictions alone: no run trains with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.engine.batch import Batch, LossSettings
from rl_training.engine.loss_weights import LossWeights
from rl_training.mathematics.scores import Scores


@dataclass(frozen=True)
class LossInputs:
    """What the loss of one microbatch knows: b sequences of T tokens."""

    weights: LossWeights  # (b, T), of the loss as it is
    scores: Scores  # (b, T), without graph; the mask is 1 on the tokens of the loss
    advantages: Tensor  # (b,), as the loss weighs them: 0 for a response that it hides
    prompt_index: Tensor  # (b,), equal for responses of the same prompt
    microbatches: float  # sequences of this optimizer step on this rank, over b: the loss is a mean over all of them
    silent_share: float  # of the step's prompts, on all ranks: those whose advantages are all 0
    settings: LossSettings | None = None  # None where the loss is not Dr-GRPO's
    rewards: Tensor | None = None  # (b,)
    truncated: Tensor | None = None  # (b,), bool: cut off at the maximum length
    sampling_logps: Tensor | None = None  # (b, T); None on-policy, where all ratios are 1
    reference_logps: Tensor | None = None  # (b, T), of the model that a KL term holds on to
    hidden: Tensor | None = None  # (b, T), bool: the policy's tokens that the loss does not see

    @property
    def ratios(self) -> Tensor:
        """ρ = π / π_sampling of each token, (b, T); 1 on-policy, and where the loss has no token."""
        if self.sampling_logps is None:
            return torch.ones_like(self.scores.logps)
        difference = self.scores.logps - self.sampling_logps.to(self.scores.logps)
        return difference.masked_fill(self.scores.mask == 0, 0.0).exp()

    @property
    def unit(self) -> float:
        """What Dr-GRPO's loss hands back to a token of advantage −1 and ratio 1: 1 / (b · microbatches · L)."""
        assert self.settings is not None
        return 1.0 / (len(self.advantages) * self.microbatches * self.settings.max_length)


@dataclass(frozen=True)
class Remedied:
    """What the step would be made with. By default, with all that it is made with."""

    weights: LossWeights | None = None  # (b, T); None: those of the loss as it is
    lr_factor: float = 1.0  # on every learning rate
    max_grad_norm: float | None = None  # None: the threshold that there is


Function = Callable[[LossInputs, float], Remedied]


def loss_inputs(
    batch: Batch, reduce: Callable[[Tensor], Tensor], reference_logps: Tensor | None = None
) -> list[LossInputs]:
    """Returns what the loss knew of each microbatch of a step on this rank. A collective.

    reference_logps  (B, T), where they are known

    ValueError off-policy without log-probabilities at sampling: the ratios are not known.
    """
    rollout, scores, settings = batch.rollout, batch.scores, batch.loss_settings
    if not rollout.on_policy and rollout.sampling_logps is None:
        raise ValueError("an off-policy step without log-probabilities at sampling: its ratios are not known")
    mask = scores.mask
    if settings is not None and settings.hides_truncated and rollout.truncated is not None:
        mask = mask * ~rollout.truncated.unsqueeze(1)
    silent = silent_share(rollout.advantages, rollout.prompt_index, reduce)

    def part(rows: slice) -> LossInputs:
        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[rows]

        return LossInputs(
            weights=LossWeights(batch.loss_weights.logps[rows], cut(batch.loss_weights.entropies)),
            scores=Scores(scores.logps[rows], scores.entropies[rows], mask[rows]),
            advantages=rollout.advantages[rows],
            prompt_index=rollout.prompt_index[rows],
            microbatches=rollout.num_sequences / (rows.stop - rows.start),
            silent_share=silent,
            settings=settings,
            rewards=cut(rollout.rewards),
            truncated=cut(rollout.truncated),
            sampling_logps=None if rollout.on_policy else cut(rollout.sampling_logps),
            reference_logps=cut(reference_logps),
            hidden=(scores.mask[rows] != 0) & (mask[rows] == 0),
        )

    return [part(slice(rows.start, rows.stop)) for rows in batch.microbatch_rows]


def silent_share(advantages: Tensor, prompt_index: Tensor, reduce: Callable[[Tensor], Tensor]) -> float:
    """Returns the share of the prompts, over all ranks, whose responses all have the advantage 0. A collective.

    >>> silent_share(torch.tensor([0.0, 0.5, 0.0, 0.0]), torch.tensor([1, 2, 3, 4]), lambda x: x)
    0.75
    """
    prompts, group = prompt_index.unique(return_inverse=True)
    sizes = advantages.new_zeros(len(prompts), dtype=torch.float64)
    sizes.index_add_(0, group, advantages.abs().double())
    silent, count = reduce(torch.stack([(sizes == 0).sum().double(), sizes.new_tensor(float(len(sizes)))])).tolist()
    return silent / count

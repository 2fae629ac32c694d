"""What a probe is given of a step: its data, the policy, the processes, and all that can be made of its gradients.

Everything here that calculates over several processes is a collective: call it on all of them, in the same order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.entropy import paired_effects
from rl_training.entropy.changed_steps import Change, iter_basis_gradients
from rl_training.entropy.fold_gradients import levels_of_folds
from rl_training.entropy.length_and_reward import RewardGradient, reward_gradient, reward_multiple_limit
from rl_training.entropy.paired_effects import GradientShares
from rl_training.gradients.loss_weights import LossWeights
from rl_training.optim.leave_one_out import FoldMeans
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.vectors import Vector
from rl_training.policy.policy import Policy
from rl_training.policy.rollout import Rollout
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.limit import Limit
from rl_training.statistics.running_pairs import Pair
from rl_training.step.data import EntropyPrediction, StepData
from rl_training.step.limits import UNKNOWN_TRUNCATION, Limits
from rl_training.step.runtime import Runtime, gradients_of_processes


@dataclass(frozen=True)
class StepContext:
    """One optimizer step, and what a probe may do with it."""

    step: StepData
    runtime: Runtime
    prediction_if_any: EntropyPrediction | None = None  # where a probe that measures the step asks for it

    @property
    def policy(self) -> Policy:
        """What scores sequences, samples them and decodes them, with the parameters as they are now."""
        return self.runtime.policy

    @property
    def ranks(self) -> Ranks:
        """The processes that train together: `ranks.reduce(x)` is a sum over them."""
        return self.runtime.ranks

    @property
    def limits(self) -> Limits:
        """What cannot be measured at this step, with what the probes' own scores of its responses have shown."""
        other_scores = None if self.prediction_if_any is None else self.prediction_if_any.other_scores
        if not other_scores:
            return self.step.limits
        return dataclasses.replace(self.step.limits, sampling_mismatch=other_scores, no_fresh_responses=other_scores)

    @property
    def prediction(self) -> EntropyPrediction:
        """What the step does to entropy to first order; ValueError where no probe has asked for it."""
        if self.prediction_if_any is None:
            raise ValueError("ctx.prediction is made only for a probe with needs = Need.ENTROPY_CHANGE (or …_ROWS)")
        return self.prediction_if_any

    @property
    def has_entropy_gradient(self) -> bool:
        """Whether the step has an entropy gradient, whose passes have been held against training's scores."""
        return self.prediction_if_any is not None and not self.prediction_if_any.limit

    def sum_by_fold(self, values: Tensor) -> Tensor:
        """Return the sums of (B, …) over the sequences of each fold, (F, …), of all processes. A collective."""
        return self.ranks.reduce(self.step.batch.sum_by_fold(values))

    def levels(self) -> Tensor:
        """Return (F, 3): of each fold the sequences, the sum of their entropies and of their lengths. A collective."""
        return levels_of_folds(self.step.batch, self.ranks, None)

    def truncated_share(self) -> Estimate:
        """Return the share of the step's responses that are cut off at the maximum length. A collective."""
        truncated = self.step.batch.rollout.truncated
        count = torch.tensor(torch.nan) if truncated is None else truncated.sum()
        total = float(self.ranks.reduce(count.to(self.step.batch.fold.device, torch.float64)))
        if math.isnan(total):
            return Estimate.missing(UNKNOWN_TRUNCATION)
        return Estimate(total / self.step.batch.num_sequences, reason="no error bar: it describes this batch")

    # --- gradients ----------------------------------------------------------------------------------------------------

    def gradients(self, weights: Sequence[LossWeights]) -> Iterator[tuple[int, FoldMeans]]:
        """Yield the number of each weighting and its gradient: a mean over each fold, and over all. A collective.

        Args:
            weights: As a loss has them; `step.batch.loss_weights` are those of the step's own gradient.
        """
        return iter_basis_gradients(self.step.batch, self.runtime, weights)

    def gradients_by_process(
        self,
        parts: Sequence[Tensor],
        weights: Sequence[LossWeights],
        shares: Tensor,
        rollout: Rollout | None = None,
    ) -> Iterator[list[Vector]]:
        """Yield the gradients of parts of a rollout, one after another: a row for each process's part. A collective.

        Args:
            parts: Rows of this process.
            shares: (B, 1), factors on the weights of each sequence.
            rollout: Whose rows they are; None: the step's.
        """
        return gradients_of_processes(rollout or self.step.batch.rollout, self.runtime, parts, weights, shares)

    def reward_gradient(self) -> RewardGradient:
        """Return the gradient of the mean reward of a response, as cheap as it comes. A collective."""
        return reward_gradient(self.step.batch, self.ranks, self.limits)

    def reward_multiple_limit(self) -> Limit | None:
        """Return the limit of a step whose gradient is no multiple of the reward's, or None. A collective."""
        return reward_multiple_limit(self.step.batch, self.ranks, self.limits)

    # --- what a changed step would do ---------------------------------------------------------------------------------

    def effects_limit(self, off_policy: Limit) -> Limit | None:
        """Return the limit of a step of which `effects`, `effect` and `gradient_shares` say nothing, or None.

        Args:
            off_policy: Why not of responses that an earlier policy has sampled.
        """
        return paired_effects.paired_effects_limit(self.step, self.prediction, off_policy)

    def effects(
        self,
        changes: Mapping[str, Change | None],
        weights: Mapping[str, Tensor],
        reward: float | LossWeights | None = None,
    ) -> dict[str, Pair]:
        """Return ΔH per token and Δreward per response of each change of the step, by name. A collective.

        It takes Need.ENTROPY_ROWS, and no `effects_limit`.

        Args:
            changes: That need no gradient but the step's own; None for the step as it is.
            weights: (2, B, T), of other losses.
            reward: The gradient of the reward, as a multiple of the step's own, or by the weights of a loss. None:
                every Δreward is nan.
        """
        return paired_effects.paired_effects(self.step, self.prediction, self.runtime, changes, weights, reward)

    def effect(self, weights: LossWeights) -> Pair:
        """Return ΔH per token, and nan, if the step's loss had these weights instead. A collective, as `effects`."""
        return self.effects({}, {"": weights.stacked()})[""]

    def gradient_shares(self, weights: Sequence[LossWeights]) -> GradientShares:
        """Return what of ΔH comes from the step's fresh gradient, and from these parts of its weights. A collective.

        It takes Need.ENTROPY_ROWS, and no `effects_limit`.
        """
        return paired_effects.gradient_shares(self.step.batch, self.prediction, self.runtime, weights)

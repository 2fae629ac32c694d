"""What a probe is given at a step: the step's data, the policy, the ranks, and quantities made from its gradients.

Everything here that computes across ranks is a collective: call it on all ranks, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.entropy import paired_effects
from rl_training.entropy.changed_steps import Change, iter_basis_gradients
from rl_training.entropy.data import EntropyPrediction
from rl_training.entropy.fold_gradients import totals_of_folds
from rl_training.entropy.reward_gradient import reward_gradient, reward_multiple_reason
from rl_training.entropy.token_effects import iter_token_products
from rl_training.optim.leave_one_out import FoldMeans
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.vectors import Vector
from rl_training.policy.policy import Policy
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.statistics.estimate import DESCRIBES_STEP, Estimate
from rl_training.statistics.running_pairs import Pair
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.data import StepData
from rl_training.step.loss_weights import LossWeights
from rl_training.step.passes import Passes, Weightings
from rl_training.step.reasons import UNKNOWN_TRUNCATION, Reasons
from rl_training.step.residual import ResidualTest
from rl_training.step.score_check import ScoreCheck


@dataclass(frozen=True)
class StepContext:
    """One optimizer step, and everything a probe may do with it."""

    step: StepData
    passes: Passes
    prediction_if_any: EntropyPrediction | None = None  # present if a probe that measures this step needs it
    gradient_remark: str = ""  # after the step: how the optimizer's gradient differs from the measured one
    # The engine's: gets the scores that probes make of the step's responses; None: who drew these is not tested.
    residual_test: ResidualTest | None = None

    @property
    def policy(self) -> Policy:
        """Scores, samples and decodes sequences with the current parameters."""
        return self.passes.policy

    @property
    def ranks(self) -> Ranks:
        """The ranks that train together. `ranks.reduce(x)` sums over them."""
        return self.passes.ranks

    @property
    def reasons(self) -> Reasons:
        """What cannot be measured at this step, as in `step.reasons`."""
        return self.step.reasons

    @property
    def prediction(self) -> EntropyPrediction:
        """What the step does to entropy to first order. ValueError if no probe has asked for it."""
        if self.prediction_if_any is None:
            raise ValueError(
                "ctx.prediction is made only for a probe with needs = Need.ENTROPY_CHANGE (or FOLD_ENTROPY_GRADIENTS)"
            )
        return self.prediction_if_any

    @property
    def has_entropy_gradient(self) -> bool:
        """Whether the step has an entropy gradient whose scores were checked against training's."""
        return self.prediction_if_any is not None and not self.prediction_if_any.reason

    @property
    def num_prompts(self) -> int | None:
        """How many prompts the step has on all ranks. None if responses to one are split (`reasons.split_prompts`)."""
        batch = self.step.batch
        return None if self.reasons.split_prompts else round(batch.num_sequences) // batch.responses_per_prompt

    def sum_by_fold(self, values: Tensor) -> Tensor:
        """Return the sum of `values` (B, …) over the sequences of each fold on all ranks, (K, …). Collective."""
        return self.ranks.reduce(self.step.batch.sum_by_fold(values))

    def totals(self) -> Tensor:
        """Return the number of sequences, the sum of entropies and the sum of lengths per fold, (K, 3). Collective."""
        return totals_of_folds(self.step.batch, self.ranks, None)

    def truncated_share(self) -> Estimate:
        """Return the share of the step's responses that were cut off at the maximum length. Collective."""
        truncated = self.step.batch.rollout.truncated
        count = torch.tensor(torch.nan) if truncated is None else truncated.sum()
        total = float(self.ranks.reduce(count.to(self.step.batch.fold.device, torch.float64)))
        if math.isnan(total):
            return Estimate.missing(UNKNOWN_TRUNCATION)
        return Estimate(total / self.step.batch.num_sequences, reason=DESCRIBES_STEP)

    # --- whether probes score what is trained -------------------------------------------------------------------------

    @property
    def tests_sampling(self) -> bool:
        """Whether `sampling_reason` tests scores, which must then have varentropies."""
        return self.residual_test is not None

    def scores_reason(self, rows: Tensor) -> Unavailable | None:
        """Return the reason why the policy that probes score is not the trained one, or None. Collective.

        Scores a few of these rows of the step, unless the entropy gradient was made of scores that have been compared.
        A probe that calls it sets `scores_responses`.
        """
        if self.has_entropy_gradient:
            return None
        score_check = ScoreCheck(self.step.batch, self.policy, self.residual_test)
        score_check.score_and_compare(rows)
        return score_check.check(self.ranks, self.reasons)

    def sampling_reason(self, rows: Tensor, scores: Scores, log_ratios: Tensor) -> Unavailable | None:
        """Return the reason why the step's responses, or those of the run so far, are no samples, or None. Collective.

        Tests tokens that are not tested yet (step/residual.py). A probe that calls it sets `scores_responses`.

        Args:
            rows: Rows of the step.
            scores: Any policy's scores of these rows, with varentropies if `tests_sampling`.
            log_ratios: (rows, T), the log-probability by that policy minus that by the one that drew each token.
        """
        test = self.residual_test
        rollout = self.step.batch.rollout
        if test is None or scores.varentropies is None:
            return None
        test.add(rows, scores, log_ratios, rollout.untested)
        return test.decide(self.ranks, self.reasons.reused, rollout.sampling_logps is not None)

    # --- gradients ----------------------------------------------------------------------------------------------------

    def gradients(self, weights: Sequence[LossWeights]) -> Iterator[tuple[int, FoldMeans]]:
        """Yield (index, gradient) for each weighting; the gradient is the mean per fold and over all folds. Collective.

        Args:
            weights: Derivatives of a loss by the scores. `step.batch.loss_weights` gives the step's own gradient.
        """
        return iter_basis_gradients(self.step.batch, self.passes, weights)

    def gradients_by_rank(
        self,
        rows_per_pass: Sequence[Tensor],
        weights: Sequence[LossWeights],
        shares: Tensor,
        use: Callable[[list[Vector]], None],
        rollout: Rollout | None = None,
    ) -> None:
        """Call `use` with the gradients of one pass after another, a vector for each rank. Collective.

        Args:
            rows_per_pass: This rank's rows of the rollout in each pass. Ranks may have different numbers of passes.
            weights: One weighting per vector.
            shares: (B, 1), a factor on the weights of each sequence.
            use: Called equally often on every rank, as often as any rank has passes.
            rollout: The rollout that the rows index. None for the step's.
        """
        self.passes.gradients_by_rank(
            rollout or self.step.batch.rollout, rows_per_pass, Weightings(weights, shares), use
        )

    def reward_gradient(self) -> tuple[float | LossWeights | None, Unavailable | None]:
        """Return the gradient of the mean reward per response, as `effects` takes it. Collective.

        Returns:
            A factor on the step's own gradient, or the weights of a loss that has it; None if it is unknown. Then the
            reason why it is no multiple of the step's own gradient, or None.
        """
        return reward_gradient(self.step, self.ranks)

    def reward_multiple_reason(self) -> Unavailable | None:
        """Return the reason why the step's gradient is no multiple of the reward's gradient, or None. Collective."""
        return reward_multiple_reason(self.step, self.ranks)

    # --- what a changed step would do ---------------------------------------------------------------------------------

    def effects_reason(self, off_policy: Unavailable) -> Unavailable | None:
        """Return the reason why `effects`, `effect` and `gradient_shares` are unavailable at this step, or None.

        Args:
            off_policy: The reason to return if an earlier policy sampled the responses.
        """
        return paired_effects.paired_effects_reason(self.step, self.prediction, off_policy)

    def effects(
        self,
        changes: Mapping[str, Change | None],
        weights: Mapping[str, Tensor],
        reward: float | LossWeights | None = None,
    ) -> dict[str, Pair]:
        """Return ΔH per token and Δreward per response for each change of the step, by name. Collective.

        Needs Need.FOLD_ENTROPY_GRADIENTS and that `effects_reason` is None.

        Args:
            changes: Changes that need no gradient except the step's own. None stands for the unchanged step.
            weights: Other losses, (2, B, T) each: derivatives by log-probabilities and by entropies.
            reward: The reward gradient, either as a multiple of the step's own or as the weights of a loss. With None,
                every Δreward is nan.
        """
        return paired_effects.paired_effects(self.step, self.prediction, self.passes, changes, weights, reward)

    def effect(self, weights: LossWeights) -> Pair:
        """Return (ΔH per token, nan) for the step with these loss weights instead. Collective, as `effects`."""
        return self.effects({}, {"": weights.stacked()})[""]

    def gradient_shares(self, weights: Sequence[LossWeights]) -> tuple[Tensor, list[Tensor]]:
        """Return how much of ΔH comes from the step's fresh gradient and from these parts of its weights. Collective.

        Needs Need.FOLD_ENTROPY_GRADIENTS and that `effects_reason` is None.

        Returns:
            Products by fold, (K, 1) each. They can be added and subtracted before `effect_of` gives them an error bar.
        """
        return paired_effects.gradient_shares(self.step.batch, self.prediction, self.passes, weights)

    def effect_of(self, products: Tensor) -> Pair:
        """Return (ΔH per token, nan) of products by fold, (K, 1), as `gradient_shares` returns them."""
        return paired_effects.effect_of(self.prediction, products)

    def token_products(self) -> Iterator[Tensor]:
        """Yield for each fold how much of ΔH comes from each single token's gradient, (B, T). Collective.

        The sum over tokens and folds, weighted by fold sizes, is `gradient_shares`' whole. Needs
        Need.FOLD_ENTROPY_GRADIENTS, and that `effects_reason` is None.
        """
        return iter_token_products(self.step.batch, self.prediction, self.passes)

"""Build a step's data, once all gradients are complete: its sequences, folds, gradients and reasons."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rl_training.engine.copied_groups import find_copies
from rl_training.engine.fold_placement import (
    choose_folds,
    fewest_prompts,
    fold_of_rows,
    fold_sizes,
    may_recompute,
    num_folds_in,
)
from rl_training.engine.fold_recorder import FoldRecorder
from rl_training.engine.gradient_check import CaughtSums, gradient_mismatch
from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.open_step import OpenStep
from rl_training.engine.requirements import Requirements
from rl_training.engine.step_checks import StepChecks
from rl_training.engine.step_reasons import other_policy_reason, reasons_of_sequences, with_gradients
from rl_training.optim.state import OptimizerView, gradients_and_view, view_optimizer
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import NO_COPIES, Batch, Copies
from rl_training.step.data import Gradients, StepData
from rl_training.step.folds import FoldSource
from rl_training.step.needs import Need
from rl_training.step.passes import Passes
from rl_training.step.reasons import Reasons


@dataclass(frozen=True)
class StepBuilder:
    """Builds the data of a training's measured steps. Its fields are the same for all of them."""

    loop: LoopSpec
    requirements: Requirements  # of all probes together
    passes: Passes  # runs further passes
    fold_recorder: FoldRecorder  # holds the fold gradients caught by hooks
    checks: StepChecks  # what earlier steps have shown about the policy, the loss and the rewards

    def build(self, open_step: OpenStep, edit_reason: Unavailable | None) -> StepData:
        """Return the data of a step whose gradients are complete. Collective.

        Args:
            open_step: The step and its plan.
            edit_reason: Set if the weights were changed since the step began.
        """
        loop = self.loop
        ranks = self.passes.ranks
        rollout = open_step.join_on_all_ranks(ranks)
        other_policy = other_policy_reason(rollout, loop, self.checks, edit_reason)
        reasons = reasons_of_sequences(open_step, loop, other_policy)
        scores = open_step.join_scores(rollout)
        copies = NO_COPIES if reasons.split_prompts else find_copies(rollout, scores, ranks)
        batch = self._batch(open_step, rollout, scores, copies, reasons)
        mean, optimizer = gradients_and_view(loop.shard, view_optimizer(loop.shard))
        gradients = Gradients(mean, loop.shard.layout)
        gradient_reason = None
        if batch.fold_source is FoldSource.RECOMPUTED:
            gradients = self._recompute_folds(batch, gradients, optimizer)
        elif batch.fold_source is FoldSource.CAUGHT:
            gradients, gradient_reason = self._add_caught_folds(batch, gradients, optimizer, open_step.needs, reasons)
        reasons = with_gradients(
            reasons,
            batch,
            open_step.needs,
            loop=loop,
            probes=self.requirements.probes,
            checks=self.checks,
            gradient_reason=gradient_reason,
        )
        if reasons.no_folds:  # what was caught is not of independent folds
            gradients = Gradients(mean, loop.shard.layout)
        return StepData(open_step.number, batch, loop.shard.weights(), gradients, optimizer, reasons, loop.fixes)

    def _batch(
        self,
        open_step: OpenStep,
        rollout: Rollout,
        scores: Scores,
        copies: Copies,
        reasons: Reasons,
    ) -> Batch:
        """Return the step's sequences in their folds. Collective.

        Copies stay together. If they lie on several ranks there is one fold: no other is independent of it.
        """
        ranks = self.passes.ranks
        index = copies.units(rollout)
        fold_groups, source = choose_folds(
            open_step.fold_groups,
            lambda: fewest_prompts(index, ranks),
            ranks.count,
            1 if copies.on_several_ranks else self.requirements.num_folds,
            plan_fails=(copies.reason or reasons.no_folds) is not None,
            can_recompute=may_recompute(open_step.needs, reasons),
        )
        fold = fold_of_rows(fold_groups, source, index, ranks.number)
        return Batch(
            rollout=rollout,
            scores=scores,
            loss_weights=open_step.join_loss_weights(),
            microbatch_rows=open_step.microbatch_rows,
            fold_groups=fold_groups,
            fold=fold,
            fold_sizes=fold_sizes(fold, num_folds_in(fold_groups), ranks),
            responses_per_prompt=open_step.responses_per_prompt,
            fold_source=source,
            loss_settings=open_step.loss_settings,
            copies=copies,
        )

    def _recompute_folds(self, batch: Batch, gradients: Gradients, optimizer: OptimizerView) -> Gradients:
        """Add the gradients by fold, and their square norms if probes need them, by further passes. Collective.

        There are no passes if the loss is known to have another term, of which they give no gradient.
        """
        terms = self.checks.terms
        terms.begin_step()
        if terms.is_known(self.passes.policy):
            return gradients
        self.fold_recorder.recompute(batch, self.passes)
        gradients, sums = self._with_recorded_folds(batch, gradients, optimizer)
        terms.check(batch, gradients, sums, self.passes)
        return gradients

    def _add_caught_folds(
        self, batch: Batch, gradients: Gradients, optimizer: OptimizerView, needs: Need, reasons: Reasons
    ) -> tuple[Gradients, Unavailable | None]:
        """Add the gradients by fold and their square norms that hooks have caught, as far as needed. Collective.

        Args:
            batch: The step's sequences and folds.
            gradients: The step's, without those by fold.
            optimizer: The optimizer before its step.
            needs: What this step's probes need.
            reasons: What cannot be measured at this step.

        Returns:
            The gradients, and the reason why the step's is not that of its folds, or None.
        """
        if not needs & (Need.FOLD_GRADIENTS | Need.SQ_NORMS):
            return gradients, None
        gradients, sums = self._with_recorded_folds(batch, gradients, optimizer)
        is_rounded = any(tensor.dtype.itemsize < 4 for tensor in self.loop.shard.leaves.values())
        mismatch = gradient_mismatch(sums, is_rounded)
        is_comparable = not (mismatch or reasons.other_terms)
        if Need.TERMS_CHECK in needs and is_comparable:
            self.checks.terms.begin_step()
            self.checks.terms.check(batch, gradients, sums, self.passes)
        return gradients, mismatch

    def _with_recorded_folds(
        self, batch: Batch, gradients: Gradients, optimizer: OptimizerView
    ) -> tuple[Gradients, CaughtSums]:
        """Return a step's gradients with vectors and square norms by fold, as far as these are recorded. Collective.

        Args:
            batch: The step's sequences and folds.
            gradients: The step's, without those by fold.
            optimizer: Says which parameters will not move.

        Returns:
            The gradients, and what tells whether those by fold are the step's.
        """
        recorder = self.fold_recorder
        sums = recorder.complete(batch.fold_sizes, gradients.mean, self.passes.ranks)
        sq_norms = recorder.sq_norms
        # a parameter that will not move counts 0 in any metric, with or without optimizer state
        if sq_norms is not None and optimizer.states is not None:
            sq_norms[:, [not state.is_updated for state in optimizer.states.values()], 1] = 0.0
        return dataclasses.replace(gradients, by_fold=recorder.by_fold, sq_norms=sq_norms), sums

"""Build a step's data, once all gradients are complete: its sequences, folds, gradients and reasons."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rl_training.engine.copied_groups import find_copies
from rl_training.engine.fold_advice import one_fold_reason
from rl_training.engine.fold_placement import choose_folds, fewest_prompts, fold_of_rows, fold_sizes, may_recompute
from rl_training.engine.fold_recorder import FoldRecorder
from rl_training.engine.gradient_check import gradient_mismatch
from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.open_step import OpenStep
from rl_training.engine.requirements import Requirements
from rl_training.engine.step_checks import StepChecks
from rl_training.engine.step_reasons import reasons_of_step
from rl_training.optim.state import OptimizerView, gradients_and_view, view_optimizer
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import NO_COPIES, Batch, Copies
from rl_training.step.data import Gradients, StepData
from rl_training.step.needs import Need
from rl_training.step.passes import Passes
from rl_training.step.reasons import Reasons


@dataclass(frozen=True)
class StepBuilder:
    """Builds the data of a training's measured steps. Its fields are the same for all of them."""

    loop: LoopSpec
    requirements: Requirements  # of all probes together
    passes: Passes  # runs further passes
    fold_recorder: FoldRecorder | None  # holds the fold gradients caught by hooks; None if no probe asks for any
    checks: StepChecks  # what earlier steps have shown about the policy, the loss and the rewards

    def build(self, open_step: OpenStep, seen_prompts: set[int], edit_reason: Unavailable | None) -> StepData:
        """Return the data of a step whose gradients are complete. Collective.

        Args:
            open_step: The step and its plan.
            seen_prompts: Prompts of the current rollout on this rank from which earlier steps have learned.
            edit_reason: Set if the weights were changed since the step began.
        """
        loop, ranks = self.loop, self.passes.ranks
        rollout = open_step.join_on_all_ranks(ranks)
        mismatch = self.checks.sampling_reason(rollout, loop, edit_reason)
        reasons = reasons_of_step(open_step, loop, seen_prompts, mismatch)
        scores = open_step.join_scores(rollout)
        copies = NO_COPIES if reasons.split_prompts else find_copies(rollout, scores, ranks)
        reasons = _with_copies(reasons, copies)
        can_recompute = may_recompute(open_step.needs, reasons)
        # Copies stay together. If they lie on several ranks there is one fold: no other is independent of it.
        index = rollout.prompt_index if copies.unit is None else copies.unit
        folds = choose_folds(
            open_step.folds,
            lambda: fewest_prompts(index, ranks),
            ranks.count,
            1 if copies.on_several_ranks else self.requirements.num_folds,
            plan_fails=reasons.no_whole_folds is not None,
            can_recompute=can_recompute,
        )
        fold = fold_of_rows(folds, index, ranks.number)
        batch = Batch(
            rollout=rollout,
            scores=scores,
            loss_weights=open_step.join_loss_weights(),
            microbatch_rows=open_step.microbatch_rows,
            folds=folds.groups,
            fold=fold,
            fold_sizes=fold_sizes(fold, folds.num_folds, ranks),
            responses_per_prompt=open_step.responses_per_prompt,
            loss_settings=open_step.loss_settings,
            copies=copies,
        )
        mean, optimizer = gradients_and_view(loop.shard, view_optimizer(loop.shard))
        gradients = Gradients(loop.shard.weights(), mean, loop.shard.layout)
        if folds.is_recomputed:
            gradients = self._recompute_folds(batch, gradients, optimizer)
        else:
            gradients = self._add_caught_folds(batch, gradients, optimizer, open_step.needs, reasons)
        other_terms = reasons.other_terms
        if folds.is_recomputed or Need.TERMS_CHECK in open_step.needs:
            other_terms = other_terms or self.checks.terms.reason  # also from earlier steps, if this was not compared
        one_fold = None
        if batch.num_folds < 2:
            one_fold = one_fold_reason(loop, self.requirements.probes, can_recompute=can_recompute)
        reasons = dataclasses.replace(
            reasons,
            other_terms=other_terms,
            one_fold=one_fold,
            relative_rewards=self.checks.relative_rewards(rollout, reasons, ranks),
        )
        return StepData(open_step.number, batch, gradients, optimizer, reasons)

    def _recompute_folds(self, batch: Batch, gradients: Gradients, optimizer: OptimizerView) -> Gradients:
        """Add the gradients by fold, and their square norms if probes need them, by further passes. Collective.

        `rows_reason` is set if the loss has another term, so they must not be used. If an earlier step has shown it,
        there are no passes.
        """
        assert self.fold_recorder is not None, "folds are recomputed only for probes that need their gradients"
        passes, terms = self.passes, self.checks.terms
        is_due = terms.begin_step()
        known_term = terms.skip_recomputing(passes.policy, is_due=is_due)
        if known_term:
            return dataclasses.replace(gradients, rows_reason=known_term)
        gradients, sums = self.fold_recorder.complete(batch, gradients, optimizer, passes)
        rows_reason = terms.check_recomputed(batch, gradients, sums, passes, is_due=is_due)
        return dataclasses.replace(gradients, rows_reason=rows_reason)

    def _add_caught_folds(
        self, batch: Batch, gradients: Gradients, optimizer: OptimizerView, needs: Need, reasons: Reasons
    ) -> Gradients:
        """Add the gradients by fold and their square norms that hooks have caught, as far as needed. Collective.

        `rows_reason` is set if they must not be used: microbatches do not hold whole folds, or the step's gradient is
        not that of its folds.

        Args:
            batch: The step's sequences and folds.
            gradients: The step's, without those by fold.
            optimizer: The optimizer before its step.
            needs: What this step's probes need.
            reasons: What cannot be measured at this step.
        """
        no_folds = reasons.no_whole_folds
        if self.fold_recorder is None or not needs & (Need.FOLD_GRADIENTS | Need.SQ_NORMS) or no_folds:
            return dataclasses.replace(gradients, rows_reason=no_folds)
        passes, terms = self.passes, self.checks.terms
        gradients, sums = self.fold_recorder.complete(batch, gradients, optimizer, passes)
        is_rounded = any(tensor.dtype.itemsize < 4 for tensor in passes.reduction.shard.leaves.values())
        mismatch = gradient_mismatch(sums, is_rounded)
        is_comparable = Need.TERMS_CHECK in needs and not (mismatch or reasons.other_terms)
        if is_comparable and terms.begin_step():
            terms.check(batch, gradients, sums, passes)
        return dataclasses.replace(gradients, rows_reason=mismatch)


def _with_copies(reasons: Reasons, copies: Copies) -> Reasons:
    """Add the reasons that copied groups give."""
    if copies.reason is None:
        return reasons
    on_ranks = copies.reason if copies.on_several_ranks else None
    return dataclasses.replace(
        reasons, no_whole_folds=copies.reason, copied_groups=copies.reason, copied_on_ranks=on_ranks
    )

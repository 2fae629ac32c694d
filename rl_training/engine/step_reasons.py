"""Which reasons a step gets, in the order in which they become known. What holds on one rank holds on all.

    once                                function              reasons (step/reasons.py)
    its sequences are complete          reasons_of_sequences  other_policy (from other_policy_reason), not_sampled,
                                                              cannot_sample, reused, split_prompts, one_response,
                                                              hooked; no_folds and other_terms as far as sequences,
                                                              settings and the loss's graph tell
    its gradients are known by fold     with_gradients        no_folds, other_terms, relative_rewards
    the prediction or a probe has       with_seen_in_scores   other_policy
    scored its responses

So that no rank waits for another, ranks agree on each before anything depends on it. build_step.py makes the first two
calls, measurer.py the last. What a step may lack besides says so itself: its copies (engine/copied_groups.py), the
optimizer's formula (optim/state.py), and each part of the prediction (entropy/prediction.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.engine.fold_advice import one_fold_reason
from rl_training.engine.fold_placement import may_recompute
from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.loss_info import OTHER_TERMS, OWN_FORWARD_PASS
from rl_training.engine.open_step import OpenStep
from rl_training.engine.probe import Probe
from rl_training.engine.step_checks import StepChecks
from rl_training.policy.rollout import Rollout, join_origins
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import Batch
from rl_training.step.folds import FoldSource
from rl_training.step.needs import Need
from rl_training.step.reasons import MIXED_PROMPTS, ONE_RESPONSE, REUSED, SAMPLING_MISMATCH, SPLIT_PROMPTS, Reasons

OTHER_SIZES = Unavailable(
    "other_sizes", "the step's microbatches differ in size from those for which its folds were planned"
)
HOOKED = Unavailable(
    "hooked",
    "parameters have hooks on their gradients (register_hook, wandb.watch), which entropy gradients would trigger too",
    fix="edit .grad after the backward, or use register_post_accumulate_grad_hook",
)
# The reasons of a rank that has none itself, if another rank has one.
MISMATCH_ELSEWHERE = SAMPLING_MISMATCH.prefixed("on another process")
NO_GROUPS_ELSEWHERE = Unavailable(
    "uneven_prompts_elsewhere", "on another process, responses cannot be assigned to prompts"
)
NO_SAMPLE_ELSEWHERE = Unavailable("no_sample_elsewhere", "another process cannot sample fresh responses")


def other_policy_reason(
    rollout: Rollout, loop: LoopSpec, checks: StepChecks, edit_reason: Unavailable | None
) -> Unavailable | None:
    """Return the reason why the policy that is trained and scored is not the one that samples, or None. Collective.

    Args:
        rollout: The step's sequences.
        loop: The training loop.
        checks: Compares scores with and without padding, at some steps.
        edit_reason: Set if the weights were changed since the step began.
    """
    padding_reason = checks.padding.check(rollout, loop.policy, loop.ranks)
    origin = rollout.origin
    sampler_reason = origin.sampler_reason if origin.knows_sampler else loop.reasons.other_policy
    return sampler_reason or edit_reason or padding_reason


def reasons_of_sequences(step: OpenStep, loop: LoopSpec, other_policy: Unavailable | None) -> Reasons:
    """Return what the sequences of a step keep from being measured. Collective.

    Args:
        step: The step, with all its microbatches.
        loop: The training loop.
        other_policy: From `other_policy_reason`.
    """
    fixes = loop.fixes
    origin = join_origins([rollout.origin for rollout in step.rollouts])
    here = {
        "other_policy": bool(other_policy),
        "not_sampled": bool(origin.sample_reason),
        "no_groups": bool(origin.groups_reason),
        "cannot_sample": bool(loop.reasons.cannot_sample),
        **_facts(step, loop),
    }
    anywhere = loop.ranks.anywhere(here, step.rollouts[0].prompt_index.device)

    def reason_if(fact: str, reason: Unavailable) -> Unavailable | None:
        return reason if anywhere[fact] else None

    no_sample_elsewhere = NO_SAMPLE_ELSEWHERE.with_fix(fixes.fresh_responses)
    no_groups = origin.groups_reason or reason_if("no_groups", NO_GROUPS_ELSEWHERE)
    mixed = MIXED_PROMPTS.with_fix(fixes.whole_prompts)
    no_whole_prompts = no_groups or reason_if("mixed", mixed) or reason_if("incomplete", mixed)
    own_pass = OWN_FORWARD_PASS.with_fix(fixes.own_forward_pass)
    return Reasons(
        other_policy=other_policy or reason_if("other_policy", MISMATCH_ELSEWHERE),
        not_sampled=origin.sample_reason or reason_if("not_sampled", MISMATCH_ELSEWHERE),
        cannot_sample=loop.reasons.cannot_sample or reason_if("cannot_sample", no_sample_elsewhere),
        reused=reason_if("reused", REUSED.with_fix(fixes.no_reuse)),
        split_prompts=no_groups or reason_if("incomplete", SPLIT_PROMPTS.with_fix(fixes.whole_prompts)),
        one_response=ONE_RESPONSE if step.responses_per_prompt == 1 else None,
        no_folds=reason_if("other_sizes", OTHER_SIZES) or no_whole_prompts,
        other_terms=reason_if("own_pass", own_pass) or reason_if("other_terms", OTHER_TERMS),
        hooked=reason_if("hooked", HOOKED),
    )


def with_gradients(
    reasons: Reasons,
    batch: Batch,
    needs: Need,
    *,
    loop: LoopSpec,
    probes: Sequence[Probe],
    checks: StepChecks,
    gradient_reason: Unavailable | None,
) -> Reasons:
    """Add what copies, gradients and rewards show to the reasons of a step's sequences. Collective.

    Args:
        reasons: From `reasons_of_sequences`.
        batch: The step's sequences and folds.
        needs: What the step's probes need.
        loop: The training loop.
        probes: All probes of the training, for advice.
        checks: What this step and earlier ones have shown of the loss and the rewards.
        gradient_reason: Why the step's gradient is not that of its folds.
    """
    is_recomputed = batch.fold_source is FoldSource.RECOMPUTED
    is_asked = is_recomputed or Need.TERMS_CHECK in needs
    other_terms = checks.terms.reason_of_step(reasons.other_terms, is_asked=is_asked)
    # Recomputed folds have the gradient of the scores alone, wherever their prompts lie.
    no_folds = other_terms if is_recomputed else batch.copies.reason or reasons.no_folds or gradient_reason
    if batch.num_folds < 2:
        no_folds = no_folds or one_fold_reason(loop, probes, can_recompute=may_recompute(needs, reasons))
    relative_rewards = checks.relative_rewards(batch, reasons, loop.ranks)
    return dataclasses.replace(reasons, no_folds=no_folds, other_terms=other_terms, relative_rewards=relative_rewards)


def with_seen_in_scores(context: StepContext, test_reason: Unavailable | None) -> StepContext:
    """Return the context whose reasons include what scores of the step's responses have shown so far.

    The prediction is made of such scores, and a probe may make others, which then speak against the prediction too.

    Args:
        context: What the probes are given.
        test_reason: Why the responses of the step, or of the run so far, are not the policy's (step/residual.py).
    """
    prediction = context.prediction_if_any
    seen = None if context.reasons.sampling_mismatch else test_reason
    if prediction is not None and prediction.is_seen_in_scores:
        seen = prediction.reason
    if seen is None:
        return context
    if prediction is not None and not prediction.reason:
        prediction = prediction.without_entropy_gradient(seen)
    step = dataclasses.replace(context.step, reasons=dataclasses.replace(context.reasons, other_policy=seen))
    return dataclasses.replace(context, step=step, prediction_if_any=prediction)


def _facts(step: OpenStep, loop: LoopSpec) -> dict[str, bool]:
    """Return what this rank knows of the step that may take something away, by name."""
    index = torch.cat([rollout.prompt_index for rollout in step.rollouts])
    prompts, prompt_of_row, counts = index.unique(return_inverse=True, return_counts=True)
    # If no boundary between microbatches ends a prompt, only all microbatches together hold whole prompts.
    has_one_fold = len(step.fold_groups) == 1 < len(step.rollouts) and len(step.fold_groups[0].folds) == 1
    is_mixed = _mixes_prompts(step, prompt_of_row, len(prompts)) or (has_one_fold and len(prompts) > 1)
    has_learned = any(rollout.origin.learned for rollout in step.rollouts)
    return {
        "own_pass": step.other_terms == OWN_FORWARD_PASS,
        "other_terms": step.other_terms == OTHER_TERMS,
        "incomplete": bool((counts != step.responses_per_prompt).any()),
        "mixed": is_mixed,
        "reused": has_learned or not step.seen_prompts.isdisjoint(prompts.tolist()),
        "hooked": any(leaf._backward_hooks for leaf in loop.shard.leaves.values()),
        "other_sizes": [len(rows) for rows in step.microbatch_rows] != [*step.sizes],
    }


def _mixes_prompts(step: OpenStep, prompt_of_row: Tensor, num_prompts: int) -> bool:
    """Return whether some prompt lies in several of the planned folds.

    Args:
        prompt_of_row: (B,), the index of each sequence's prompt.
    """
    # The passes of all fold groups are consecutive rows.
    groups_of_passes = [
        torch.full((len(rows),), number)
        for number, fold_group in enumerate(step.fold_groups)
        for rows in fold_group.rows_per_pass
    ]
    fold_group_of_row = torch.cat(groups_of_passes).to(prompt_of_row.device)
    if len(fold_group_of_row) != len(prompt_of_row):
        return False
    pairs = prompt_of_row * len(step.fold_groups) + fold_group_of_row
    return len(pairs.unique()) > num_prompts

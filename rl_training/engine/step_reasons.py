"""What cannot be measured at a step: what holds on one rank holds on all, so that no rank waits for another."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.loss_info import OTHER_TERMS, OWN_FORWARD_PASS
from rl_training.engine.open_step import OpenStep
from rl_training.policy.rollout import join_origins
from rl_training.statistics.unavailable import Unavailable
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


def reasons_of_step(step: OpenStep, loop: LoopSpec, mismatch: Unavailable | None) -> Reasons:
    """Return what cannot be measured at this step. Collective: what holds on one rank holds on all.

    Args:
        step: The step, with all its microbatches.
        loop: The training loop.
        mismatch: Set if the sequences are not samples of the scored policy.
    """
    fixes = loop.fixes
    origin = join_origins([rollout.origin for rollout in step.rollouts])
    no_fresh_responses = loop.reasons.no_fresh_responses
    here = {
        "mismatch": bool(mismatch),
        "no_sample": bool(origin.sample_reason),
        "no_groups": bool(origin.groups_reason),
        "no_fresh_responses": bool(no_fresh_responses),
        **_facts(step, loop),
    }
    anywhere = loop.ranks.anywhere(here, step.rollouts[0].prompt_index.device)

    def reason_if(fact: str, reason: Unavailable) -> Unavailable | None:
        return reason if anywhere[fact] else None

    mismatch = mismatch or reason_if("mismatch", MISMATCH_ELSEWHERE)
    no_sample = origin.sample_reason or reason_if("no_sample", MISMATCH_ELSEWHERE)
    no_groups = origin.groups_reason or reason_if("no_groups", NO_GROUPS_ELSEWHERE)
    no_fresh_elsewhere = reason_if("no_fresh_responses", NO_SAMPLE_ELSEWHERE.with_fix(fixes.fresh_responses))
    split = no_groups or reason_if("incomplete", SPLIT_PROMPTS.with_fix(fixes.whole_prompts))
    mixed = MIXED_PROMPTS.with_fix(fixes.whole_prompts)
    no_whole_prompts = no_groups or reason_if("mixed", mixed) or reason_if("incomplete", mixed)
    own_pass = OWN_FORWARD_PASS.with_fix(fixes.own_forward_pass)
    return Reasons(
        sampling_mismatch=mismatch or no_sample,
        no_fresh_responses=mismatch or no_fresh_responses or no_fresh_elsewhere,
        reused=reason_if("reused", REUSED.with_fix(fixes.no_reuse)),
        split_prompts=split,
        no_baseline=ONE_RESPONSE if step.responses_per_prompt == 1 else split,
        no_whole_folds=reason_if("other_sizes", OTHER_SIZES) or no_whole_prompts,
        # As far as the loop or the loss's graph tells. Gradients may show more: TermsCheck.reason_of_step decides.
        other_terms=reason_if("own_pass", own_pass) or reason_if("other_terms", OTHER_TERMS),
        hooked=reason_if("hooked", HOOKED),
        dr_grpo_fix=fixes.dr_grpo,
    )


def _facts(step: OpenStep, loop: LoopSpec) -> dict[str, bool]:
    """Return what this rank knows of the step that may take something away, by name."""
    index = torch.cat([rollout.prompt_index for rollout in step.rollouts])
    prompts, prompt_of_row, counts = index.unique(return_inverse=True, return_counts=True)
    # If no boundary between microbatches ends a prompt, only all microbatches together hold whole prompts.
    has_one_fold = len(step.folds) == 1 < len(step.rollouts) and len(step.folds[0].folds) == 1
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
    # The passes of all groups are consecutive rows.
    groups = [
        torch.full((len(rows),), number)
        for number, fold_group in enumerate(step.folds)
        for rows in fold_group.rows_per_pass
    ]
    group = torch.cat(groups).to(prompt_of_row.device)
    return len(group) == len(prompt_of_row) and len((prompt_of_row * len(step.folds) + group).unique()) > num_prompts

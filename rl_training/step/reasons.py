"""Why a part of δH cannot be had at a step: in words that name the way out."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.mathematics.kish import kish_size_of_sums, kish_sums
from rl_training.step.entropy_gradients import Choice
from rl_training.step.types import StepContext

MIN_ESS = 0.5  # share of the sequences below which importance weights are worthless
REUSED = (
    "an earlier step has learned from these responses (num_iterations > 1), and not every step since then was "
    "measured: the optimizer's momentum holds their noise; use every=1"
)
CHOSEN_REUSED = (
    "an earlier step has learned from these responses (num_iterations > 1): the optimizer's momentum holds their "
    "noise, and moments without single responses are not kept"
)
SPLIT_PROMPTS = (
    "the responses of a prompt are spread over several optimizer steps, or processes: use DrGRPOTrainer, or "
    "attach(..., whole_prompts=True), with a multiple of num_generations sequences in a microbatch"
)
NO_SAMPLING_LOGPS = (
    "an off-policy step whose rollout has no log-probabilities of its sampling: there are no importance ratios"
)
OTHER_TERMS = (
    "the loss has a term beside log-probabilities and entropies (the auxiliary loss of a mixture of experts), whose "
    "share of single responses is not known"
)


def why_no_entropy_gradient(ctx: StepContext, ratios: Tensor | None) -> str:
    """Returns why this step has no X at all, "" if it has one. Off-policy a collective: the ratios' effective size."""
    if ctx.sampled_otherwise:
        return ctx.sampled_otherwise
    if not ctx.complete_prompts:
        return SPLIT_PROMPTS
    if ratios is None:
        return NO_SAMPLING_LOGPS
    if ctx.rollout.on_policy:
        return ""
    mine = torch.cat([kish_sums(ratios), ratios.new_tensor([float(len(ratios))])])
    total, total_of_squares, num_sequences = ctx.reduce(mine).tolist()
    ess = kish_size_of_sums(total, total_of_squares) / num_sequences
    if not ess >= MIN_ESS:
        return f"off-policy: the effective sample size is {ess:.2f} of the sequences, below {MIN_ESS}"
    return ""


def why_no_forward(ctx: StepContext, num_folds: int, left_out: bool) -> str:
    """Returns why no fold can be left out of this step, "" if it can.

    num_folds  of all ranks        left_out  whether the optimizer's moments can do without a fold too
    """
    if ctx.optimizer.states is None:
        return ctx.optimizer.reason
    if not ctx.whole_prompts:
        return (
            "the microbatches mix prompts, so no fold of whole prompts can be left out: "
            "use DrGRPOTrainer, or attach(..., whole_prompts=True)"
        )
    if ctx.other_terms and ctx.fold_gradients is None:
        return f"{OTHER_TERMS}: use at most one fold per microbatch"
    if num_folds < 2:
        return "one fold in all: nothing is left when it is left out; use smaller microbatches, or a larger num_folds"
    return "" if left_out else REUSED


def why_no_own_prompts(ctx: StepContext, choice: Choice) -> str:
    """Returns why the responses of X cannot be left out of the step alone, "" if they can."""
    if choice.prompt_share < 1.0:
        return "with a share of the prompts no prompt's other responses stand for the drawn ones: set prompt_share=1"
    if choice.responses_per_prompt >= ctx.responses_per_prompt:
        return "every response is in the entropy gradient, none is left for the update: lower responses_per_prompt"
    return why_no_responses(ctx, num_folds=2)


def why_no_responses(ctx: StepContext, num_folds: int) -> str:
    """Returns why no single response's share of a step can be told, "" if it can."""
    if ctx.other_terms or ctx.reused:
        return OTHER_TERMS if ctx.other_terms else CHOSEN_REUSED
    return why_no_forward(ctx, num_folds, left_out=True)

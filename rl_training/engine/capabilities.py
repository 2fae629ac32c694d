"""Why a part of δH cannot be had at a step: in words that name the way out."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.mathematics.adamw import AdamWState
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
FIRST_IN_BF16 = (
    "Adam's first step divides by |g| itself, and where the responses' gradients nearly cancel, their rounding to bf16 "
    "decides: from the next step on"
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
    return _why_no_single_response(ctx, num_folds=2)


def why_no_responses(ctx: StepContext, num_folds: int) -> str:
    """Returns why no response's share of forward can be told, "" if it can."""
    states = (ctx.optimizer.states or {}).values()
    first_of_adam = any(isinstance(state, AdamWState) and state.moves and state.step == 0 for state in states)
    return FIRST_IN_BF16 if ctx.autocast and first_of_adam else _why_no_single_response(ctx, num_folds)


def _why_no_single_response(ctx: StepContext, num_folds: int) -> str:
    if ctx.other_terms or ctx.reused:
        return OTHER_TERMS if ctx.other_terms else CHOSEN_REUSED
    return why_no_forward(ctx, num_folds, left_out=True)

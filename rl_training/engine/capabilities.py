"""What can be measured at a step, and why not: reasons in words that name the fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.engine.batch import Batch
from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.kish import kish_size_of_sums, kish_sums

MIN_ESS = 0.5  # share of the sequences below which importance weights are worthless
REUSED = (
    "an earlier step has trained on these responses (num_iterations > 1; in verl ppo_epochs > 1), and the optimizer's "
    "momentum holds their noise: learn from each response once"
)
SPLIT_PROMPTS = "the responses of a prompt are spread over several optimizer steps, or processes"
MIXED_PROMPTS = "the microbatches mix prompts, so no fold of whole prompts can be left out"
MIXED_BLOCKS = "the microbatches mix prompts, and responses of one prompt are not independent units"
NO_SAMPLING_LOGPS = (
    "this step is off-policy, and its rollout has no sampling log-probabilities: there are no importance ratios"
)
OTHER_TERMS = (
    "the loss has a term beside log-probabilities and entropies (the auxiliary loss of a mixture of experts), whose "
    "share per response is not known"
)
NOT_DR_GRPO = "the trace can be split only for Dr-GRPO's loss"
ONE_FOLD = "there is only one fold, so none can be left out: use smaller microbatches, or a larger num_folds"
ONE_BLOCK = "there is only one block: use smaller microbatches, or more processes, so that a step has at least two"


@dataclass(frozen=True)
class Fixes:
    """What to do so that more can be measured, in the words of the loop. Reasons end with it."""

    whole_prompts: str = "keep all responses to a prompt in one microbatch"
    dr_grpo: str = "train with that loss"


@dataclass(frozen=True)
class Capabilities:
    """What is known of a step. Every `why_no_…` returns "" where the thing is available, else why it is not.

    A field that is a string is such a reason too.
    """

    sampling_mismatch: str  # why the sequences are not samples of the policy that is scored (top-p)
    no_fresh_responses: str  # why `policy.sample` may not be asked
    no_formula: str  # why the optimizer's step has no formula
    complete_prompts: bool  # on every rank, every prompt of the step is there with all its G responses
    whole_prompts: bool  # and lies in one microbatch, on every rank
    folds_of_gradient: bool  # the gradient of each fold is kept
    num_folds: int  # of all ranks
    reused: bool  # an earlier optimizer step has already learned from some of these sequences
    other_terms: bool  # the loss has terms beside log-probabilities and entropies
    dr_grpo: bool  # the loss is Dr-GRPO's: −A ∂log π summed over all tokens on one scale, A = reward − group's mean
    first_of_adam: bool  # the optimizer has Adam's moments and they are still zero
    fixes: Fixes = Fixes()

    @property
    def split_prompts(self) -> str:
        """Why not every prompt is there with all its responses, "" if it is."""
        return "" if self.complete_prompts else f"{SPLIT_PROMPTS}: {self.fixes.whole_prompts}"

    @property
    def mixed_prompts(self) -> str:
        """Why prompts do not lie in one microbatch each, "" if they do."""
        return "" if self.whole_prompts else f"{MIXED_PROMPTS}: {self.fixes.whole_prompts}"

    def why_no_entropy_gradient(self, ratios: Tensor | None) -> str:
        """X needs samples of the policy with all responses to each prompt, and, off-policy, importance ratios."""
        if self.sampling_mismatch:
            return self.sampling_mismatch
        return self.split_prompts or (NO_SAMPLING_LOGPS if ratios is None else "")

    def why_no_forward(self) -> str:
        """Returns why no fold can be left out of the step."""
        if self.no_formula or self.mixed_prompts:
            return self.no_formula or self.mixed_prompts
        if self.other_terms and not self.folds_of_gradient:
            return f"{OTHER_TERMS}: use at most one fold per microbatch"
        if self.num_folds < 2:
            return ONE_FOLD
        return REUSED if self.reused else ""

    def why_no_blocks(self, blocks: float) -> str:
        """Returns why the microbatches are not at least two independent blocks, from which the noise follows."""
        if not self.whole_prompts:
            return f"{MIXED_BLOCKS}: {self.fixes.whole_prompts}"
        if self.reused:
            return (
                "an earlier step has trained on these responses (num_iterations > 1; in verl ppo_epochs > 1): "
                "they are not a fresh sample"
            )
        return ONE_BLOCK if blocks < 2 else ""

    def why_no_split_of_trace(self) -> str:
        """Returns why the noise cannot be split into that of prompts and that of responses."""
        return self.sampling_mismatch or ("" if self.dr_grpo else f"{NOT_DR_GRPO}: {self.fixes.dr_grpo}")


def why_too_far_off_policy(ratios: Tensor, batch: Batch, reduce: Callable[[Tensor], Tensor]) -> str:
    """Returns why importance ratios are worthless, "" if they are not. Off-policy a collective."""
    if batch.rollout.on_policy:
        return ""
    mine = torch.cat([kish_sums(ratios), ratios.new_tensor([float(len(ratios))])])
    total, total_of_squares, num_sequences = reduce(mine).tolist()
    ess = kish_size_of_sums(total, total_of_squares) / num_sequences
    if not ess >= MIN_ESS:
        return f"off-policy: the effective sample size is {ess:.2f} of the sequences, below {MIN_ESS}"
    return ""


def is_first_of_adam(states: Mapping[str, object] | None) -> bool:
    """Returns whether Adam's moments of some parameter that moves are still zero."""
    return any(isinstance(s, AdamWState) and s.moves and s.step == 0 for s in (states or {}).values())

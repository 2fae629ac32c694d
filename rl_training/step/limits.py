"""What cannot be measured at a step, in words that name the fix."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_training.errors import UserError
from rl_training.gradients.folds import DEFAULT_NUM_FOLDS, plan_folds

REUSED = (
    "an earlier step has trained on these responses (num_iterations > 1; in verl ppo_epochs > 1; a replay buffer): "
    "they are not a fresh sample, and the optimizer's momentum holds their noise. Learn from each response once"
)
MISMATCHED = "on another process, the responses are no samples of the policy that is scored"
SPLIT_PROMPTS = "the responses of a prompt are spread over several optimizer steps, or processes"
ONE_RESPONSE = "a prompt has one response, and no others that it could be held against: sample at least two"
MIXED_PROMPTS = "the microbatches mix prompts, so their gradients cannot be split into folds of whole prompts"
OTHER_SIZES = "the step's microbatches have other sizes than its folds were made for when the first one came"
OTHER_TERMS = (
    "the loss has a term beside log-probabilities and entropies (the auxiliary loss of a mixture of experts, a loss on "
    "other sequences), whose share per response is not known"
)
HOOKED = (
    "parameters have hooks on their gradients (register_hook, wandb.watch), which entropy gradients would run through "
    "too: edit .grad after the backward, or use register_post_accumulate_grad_hook"
)
NO_SAMPLING_LOGPS = (
    "this step is off-policy, and its rollout has no sampling log-probabilities: there are no importance ratios"
)
NO_REWARDS = "the rewards of these responses are not known"
NO_OTHERS = "no two responses to one prompt of this step have rewards"


@dataclass(frozen=True)
class Fixes:
    """What to do so that more can be measured, in the words of the loop. Reasons end with it."""

    whole_prompts: str = "keep all responses to a prompt side by side, in one microbatch or several in a row"
    dr_grpo: str = ""  # how the loss's settings differ from Dr-GRPO's; "" where they do not, or nobody knows
    # With {size} of a microbatch, {count} of them to a step of a process, and {sequences} of a step of all.
    batch: str = "measured_loop(microbatch_size={size}, microbatches={count})"
    steps: str = "measured_loop(microbatches={count})"  # the same for larger steps of the same microbatches
    num_folds: str = "{probe}(num_folds={folds})"  # {name} is the probe's, {probe} its class

    def more_folds(self, group: int, size: int, count: int, num_ranks: int, probe: object | None) -> str:
        """Return what to type so that a step has DEFAULT_NUM_FOLDS folds.

        Args:
            group: Responses to a prompt.
            size: Sequences of each of `count` microbatches of each process.
            probe: One that has the option num_folds; None: there is none.
        """

        def folds(size: int, count: int, num_folds: int | None = None) -> int:
            try:
                return plan_folds([size] * count, group, num_ranks, num_folds)[-1].folds.stop
            except UserError:
                return 0

        def batch(size: int, count: int) -> str:
            return self.batch.format(size=size, count=count, sequences=size * count * num_ranks)

        own = size * count
        prompts = own // group * num_ranks
        # A microbatch of whole prompts, or a part of one.
        fitting = [part for part in range(1, size) if own % part == 0 and 0 in (part % group, group % part)]
        smaller = [part for part in fitting if folds(part, own // part) >= DEFAULT_NUM_FOLDS]
        advice = [f"smaller microbatches, {batch(smaller[-1], own // smaller[-1])}"] if smaller else []
        cut = next(
            (number for number in range(DEFAULT_NUM_FOLDS, prompts + 1) if folds(size, count, number) == number), None
        )
        if cut and probe is not None:
            option = self.num_folds.format(name=getattr(probe, "name", ""), probe=type(probe).__name__, folds=cut)
            advice.append(f"{option}, whose folds cost a further pass each")
        if advice:
            return ", or ".join(advice)
        part = math.gcd(size, group)
        more = -(-DEFAULT_NUM_FOLDS // num_ranks) * group // part
        larger = batch(part, more)
        if part == size:
            larger = self.steps.format(count=more, sequences=size * more * num_ranks)
        cost = f"{part * more / own:.3g} times as many responses a step"
        return f"steps of at least {DEFAULT_NUM_FOLDS} prompts, where these have {prompts}: {larger} ({cost})"


@dataclass(frozen=True)
class Limits:
    """Why something cannot be measured at a step, by what is missing; "" where it is there."""

    sampling_mismatch: str = ""  # the sequences are not samples of the policy that is scored (top-p)
    no_fresh_responses: str = ""  # `policy.sample` may not be asked
    reused: str = ""  # an earlier optimizer step has already learned from some of these sequences
    split_prompts: str = ""  # on some rank, a prompt of the step lacks some of its G responses
    no_baseline: str = ""  # that, or G is 1: a response has no others to the same prompt
    mixed_prompts: str = ""  # or lies in several folds
    other_terms: str = ""  # the loss has terms beside log-probabilities and entropies: its weights are not all of it
    hooked: str = ""  # on some rank, gradients run through hooks of the loop
    more_folds: str = ""  # where a step is one fold, what to do so that it has more
    another_loss: str = ""  # a hint: what to set so that the loss is Dr-GRPO's. What it is, its weights say

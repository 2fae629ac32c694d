"""What cannot be measured at a step or in a training run, and the reasons that several files give.

A reason that is decided in one file is defined there: an optimizer without a formula, padding that matters. The
announcement at the start of training and the nan of a step use the same reason. docs/reference/reasons.md lists them
all.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_training.statistics.unavailable import Unavailable

REUSED = Unavailable(
    "reused",
    "an earlier step has trained on these responses, so they are not a fresh sample, and the optimizer's momentum "
    "holds their noise",
)
SAMPLING_MISMATCH = Unavailable("sampling_mismatch", "the responses are not samples of the scored policy")
SPLIT_PROMPTS = Unavailable(
    "split_prompts", "the responses of a prompt are spread over several optimizer steps, or processes"
)
MIXED_PROMPTS = Unavailable(
    "mixed_prompts", "the microbatches mix prompts, so their gradients cannot be split into folds of whole prompts"
)
ONE_RESPONSE = Unavailable(
    "one_response",
    "a prompt has only one response, and no other to compare it with",
    fix="sample at least two",
)
NO_SAMPLING_LOGPS = Unavailable(
    "no_sampling_logps",
    "this step is off-policy, and its rollout has no sampling log-probabilities: there are no importance ratios",
)
UNKNOWN_TRUNCATION = Unavailable(
    "unknown_truncation", "it is not known which responses were cut off at the maximum length"
)
NO_REWARDS = Unavailable("no_rewards", "the rewards of these responses are not known")
NO_OTHERS = Unavailable("no_others", "no two responses to one prompt of this step have rewards")
NO_TOKENS = Unavailable("no_tokens", "no response of this step has a token sampled from the policy")
STEP_TAKEN_AGAIN = Unavailable(
    "step_taken_again",
    "a step of this number was measured before (it failed and is retried, or numbering has restarted), so the update "
    "before it is no longer kept",
)


def reason_of_loop(text: str) -> Unavailable | None:
    """Return the loop's reason why responses are not samples of the scored policy, or None.

    Args:
        text: The loop's own words. "" if they are samples of it.
    """
    return Unavailable(SAMPLING_MISMATCH.code, text) if text else None


@dataclass(frozen=True, kw_only=True)
class Fixes:
    """How to measure more, in the host's own settings. Reasons end with these texts."""

    # {size}: sequences per microbatch; {count}: microbatches per step and rank; {sequences}: per step on all ranks;
    # {prompts}: the prompts of these sequences.
    batch_setting: str
    steps_setting: str  # the same for larger steps of unchanged microbatches
    num_folds_setting: str  # {name}: the probe's name; {probe}: its class; {folds}: the number of folds
    whole_prompts: str = "keep all responses to a prompt side by side, in one microbatch or several in a row"
    dr_grpo: str = ""  # how the loss's settings differ from Dr-GRPO's; "" if they do not, or it is unknown
    no_reuse: str = "learn from each response once"
    fresh_responses: str = ""  # how every process can sample fresh responses
    own_forward_pass: str = "compute the loss from the log-probabilities that probes are given"


@dataclass(frozen=True)
class Reasons:
    """Why something cannot be measured at a step or in a whole training run: None where nothing is in the way."""

    sampling_mismatch: Unavailable | None = None  # the sequences are not samples of the scored policy (top-p)
    no_fresh_responses: Unavailable | None = None  # `policy.sample` must not be called
    reused: Unavailable | None = None  # an earlier optimizer step has already learned from some of these sequences
    split_prompts: Unavailable | None = None  # on some rank, a prompt of the step lacks some of its G responses
    no_baseline: Unavailable | None = None  # split prompts, or G is 1: a response has no others to the same prompt
    # The microbatches do not hold whole folds: split or mixed prompts, other sizes than planned, or copied groups.
    no_whole_folds: Unavailable | None = None
    copied_groups: Unavailable | None = None  # some groups are copies; folds and units of errors are of distinct groups
    copied_on_ranks: Unavailable | None = None  # set if copies lie on several ranks: no rank's prompts are independent
    one_fold: Unavailable | None = None  # the step has only one fold
    other_terms: Unavailable | None = None  # the loss has terms besides these log-probabilities and entropies
    relative_rewards: Unavailable | None = None  # every group has the same mean reward, whatever the policy does
    hooked: Unavailable | None = None  # on some rank, the loop has hooks on gradients
    dr_grpo_fix: str = ""  # what to set to make the loss Dr-GRPO's; its weights tell whether it is

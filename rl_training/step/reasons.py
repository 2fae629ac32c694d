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
    dr_grpo: str = ""  # what makes the loss Dr-GRPO's; "" if its settings are already, or they are unknown
    no_reuse: str = "learn from each response once"
    fresh_responses: str = ""  # how every process can sample fresh responses
    own_forward_pass: str = "compute the loss from the log-probabilities that probes are given"


@dataclass(frozen=True)
class Reasons:
    """Facts that keep something from being measured at a step, or in a whole training run. None: it is not so.

    Beside each stands what it takes away: numbers, or one of the properties below. engine/step_reasons.py says when
    each becomes known.
    """

    # The policy that probes score is not the one that samples: `sampling_mismatch` and `no_fresh_responses`.
    other_policy: Unavailable | None = None
    not_sampled: Unavailable | None = None  # these responses are no samples (a replay buffer): `sampling_mismatch`
    cannot_sample: Unavailable | None = None  # the loop cannot sample fresh responses: `no_fresh_responses`
    reused: Unavailable | None = None  # an earlier step has learned from some of these responses: δH, the noise
    # On some rank, a prompt of the step lacks some of its G responses: `no_baseline`, and error bars over prompts.
    split_prompts: Unavailable | None = None
    one_response: Unavailable | None = None  # G is 1: `no_baseline`
    # There are no two folds whose gradients are known, even if some are recorded: `forward`, the noise.
    no_folds: Unavailable | None = None
    # The loss has terms besides these log-probabilities and entropies: what is recomputed from its weights on them.
    other_terms: Unavailable | None = None
    relative_rewards: Unavailable | None = None  # every group has the same mean reward: changes of the reward
    hooked: Unavailable | None = None  # on some rank, the loop has hooks on gradients: the entropy gradient

    @property
    def sampling_mismatch(self) -> Unavailable | None:
        """Why the step's responses are not samples of the scored policy."""
        return self.other_policy or self.not_sampled

    @property
    def no_fresh_responses(self) -> Unavailable | None:
        """Why `policy.sample` must not be called."""
        return self.other_policy or self.cannot_sample

    @property
    def no_baseline(self) -> Unavailable | None:
        """Why a response has no others to the same prompt with which it could be compared."""
        return self.one_response or self.split_prompts

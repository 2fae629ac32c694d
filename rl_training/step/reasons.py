"""What cannot be measured at a step or in a training run: a code, a message and a fix for each reason.

The announcement at the start of training and the nan of a step use the same reason. Those of lower layers (an optimizer
without a formula, padding that matters) are defined next to what they concern.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_training.statistics.unavailable import Unavailable

# The sequences.
REUSED = Unavailable(
    "reused",
    "an earlier step has trained on these responses (num_iterations > 1; in verl ppo_epochs > 1; a replay buffer): "
    "they are not a fresh sample, and the optimizer's momentum holds their noise",
)
SAMPLING_MISMATCH = Unavailable("sampling_mismatch", "the responses are not samples of the scored policy")
SPLIT_PROMPTS = Unavailable(
    "split_prompts", "the responses of a prompt are spread over several optimizer steps, or processes"
)
ONE_RESPONSE = Unavailable(
    "one_response",
    "a prompt has only one response, and no other to compare it with",
    fix="sample at least two",
)
# The reasons of a rank that has none itself, if another rank has one.
REASONS_ELSEWHERE = {
    "sampling_mismatch": SAMPLING_MISMATCH.prefixed("on another process"),  # another sampler
    "sample": SAMPLING_MISMATCH.prefixed("on another process"),  # responses that are no sample
    "groups": Unavailable("uneven_prompts_elsewhere", "on another process, responses cannot be assigned to prompts"),
    "no_fresh_responses": Unavailable(
        "no_sample_elsewhere",
        "another process cannot sample fresh responses",
        fix="give sample=... to measured_loop on all",
    ),
}
NO_SAMPLING_LOGPS = Unavailable(
    "no_sampling_logps",
    "this step is off-policy, and its rollout has no sampling log-probabilities: there are no importance ratios",
)
UNKNOWN_TRUNCATION = Unavailable(
    "unknown_truncation", "it is not known which responses were cut off at the maximum length"
)
NO_REWARDS = Unavailable("no_rewards", "the rewards of these responses are not known")
NO_OTHERS = Unavailable("no_others", "no two responses to one prompt of this step have rewards")
RELATIVE_REWARDS = Unavailable(
    "relative_rewards",
    "the responses to every prompt have the same mean reward, as rewards relative to their group have (whitened, "
    "ranked): no step can change it",
    fix="return rewards that do not depend on the other responses; advantages subtract the group's mean anyway",
)
# The folds.
MIXED_PROMPTS = Unavailable(
    "mixed_prompts", "the microbatches mix prompts, so their gradients cannot be split into folds of whole prompts"
)
OTHER_SIZES = Unavailable(
    "other_sizes", "the step's microbatches differ in size from those for which its folds were planned"
)
COPIED_GROUPS = Unavailable(
    "copied_groups",
    "only {distinct} of the {total} groups of responses that this step learns from are distinct, the others are copies "
    "of them (a batch that is filled up by duplicating prompts): a copy is no further sample",
    fix="generate as many groups as a step learns from",
)
ONE_FOLD = Unavailable(
    "one_fold",
    "a step has only one fold, so there is no scatter between folds and none can be left out",
    fix="use {more}",
)
# The policy that is scored.
OTHER_SCORES = Unavailable(
    "other_scores",
    "{cause} (training's {what} differ by {difference:.2g} nats per token from those that probes calculate with the "
    "same weights at temperature={temperature:g}; rounding and dropout explain at most {tolerance:.2g})",
)
TOO_FAR = Unavailable(
    "sampler_too_far",
    "the sampler is too far from this policy: the effective sample size is {ess:.2f} of the sequences, below {least}",
    fix="fewer stale steps, sampling in fp32 or shorter responses help",
)
NO_TOKENS = Unavailable("no_tokens", "no response of this step has a token sampled from the policy")
# Whether the policy drew the responses: step/residual.py.
NOT_DRAWN = Unavailable(
    "not_drawn_by_policy",
    "{what}: over the {tokens} tested tokens {which}, log π(token) + entropy is {mean:+.2g} nats on average, "
    "{errors:+.1f} standard errors from 0, and chance stays within {chance:.1f}",
    fix="generate with the weights that are trained, at temperature {temperature:g}, without forced tokens and logits "
    "processors, or report the sampler's own log-probabilities. If responses are chosen by their rewards, say so: "
    "Rollout(untested=True)",
)
UNTESTED = Unavailable(
    "untested",
    "responses were chosen by what had been drawn (groups of equal rewards left out, say) or are given, so whether the "
    "policy drew their tokens is not tested",
)
RANDOM_PASSES = Unavailable(
    "random_passes",
    "the probes' passes are training's, with dropout or another noise of their own, and the sampler has none",
)
# The loss and its backward.
OTHER_LOSS = Unavailable(
    "other_loss",
    "the loss is not just log-probabilities weighted by reward minus the prompt's mean reward (it has other weights, a "
    "KL term or an entropy bonus), so the step's gradient is not a multiple of the reward gradient",
)
OTHER_TERMS = Unavailable(
    "other_terms",
    "the loss has a term besides log-probabilities and entropies (the auxiliary loss of a mixture of experts, a loss "
    "on other sequences), whose share per response is not known",
)
OWN_FORWARD_PASS = Unavailable(
    "own_forward_pass",
    "the loss is computed from a forward pass of its own, so how it weights the tokens is not known",
)
HOOKED = Unavailable(
    "hooked",
    "parameters have hooks on their gradients (register_hook, wandb.watch), which entropy gradients would trigger too",
    fix="edit .grad after the backward, or use register_post_accumulate_grad_hook",
)
OTHER_GRADIENT = Unavailable(
    "other_gradient",
    "the gradient of a fold differs by {distance:.2g} of its norm from the one that its log-probabilities and "
    "entropies give: the loss has another term (declare it with other_terms=True), or something changes gradients "
    "during the backward",
)
GRADIENT_IN_PARTS = Unavailable(
    "gradient_in_parts",
    "the gradient differs from that of the microbatches, because parameters received it in several parts",
    fix="call backward once for each microbatch, and use checkpointing with use_reentrant=False",
)
GRADIENT_MISMATCH = Unavailable(
    "gradient_mismatch",
    "the gradient differs from that of the microbatches by {distance:.2g} of its norm: an extra backward, a "
    "missing zero_grad or one between microbatches, a GradScaler, or edited gradients",
)
# The weights, and the optimizer's step.
_OTHERS = "something other than the optimizer that probes know of (a second optimizer, weight averaging, an edit)"
EDITED_AFTER_STEP = Unavailable("edited_after_step", f"weights were changed after it by {_OTHERS}")
EDITED_BEFORE_STEP = Unavailable(
    "edited_before_step", f"weights were changed between the probes' measurement and the optimizer's step by {_OTHERS}"
)
EDITED_WITHIN_STEP = Unavailable(
    "edited_within_step",
    "weights were changed in this step before the optimizer changed them, so its responses and gradients are not those "
    "of the policy that is updated",
    fix="swap or edit weights between steps",
)
NOT_THE_FORMULA = Unavailable(
    "not_the_formula",
    "the step was not the optimizer's formula: the weights' change differs from it by {error:.2g} of its norm "
    "(step/formula_error)",
    fix="clip as max_grad_norm says, step once, with this optimizer and learning rate, and change weights in no "
    "other way",
)
LEFT_OUT = Unavailable("left_out", "this step was left out: the optimizer has not changed the weights")
FAILED = Unavailable("failed", "the step failed before the optimizer took it")
FIRST_STEP = Unavailable(
    "first_step",
    "there is no earlier update to look back on: this is the first measured step, or the first one after a restart",
)
STEP_TAKEN_AGAIN = Unavailable(
    "step_taken_again",
    "a step of this number was measured before (it failed and is retried, or numbering has restarted), so the update "
    "before it is no longer kept",
)
STEP_NOT_MEASURED = Unavailable(
    "step_not_measured",
    "step {step} was not measured, so its update is not known; backward needs every=1, or steps=2",
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
    num_folds_setting: str  # {name} is the probe's name, {probe} its class
    whole_prompts: str = "keep all responses to a prompt side by side, in one microbatch or several in a row"
    dr_grpo: str = ""  # how the loss's settings differ from Dr-GRPO's; "" if they do not, or it is unknown
    no_reuse: str = "learn from each response once"
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

"""Every intervention by name: its strength, what it needs, and when it has no effect.

How names are written:

    bonus            at its default strength
    bonus:0.02       at another strength
    mis:0.5,2        with both bounds
    my.py:softer     your own function from (LossInputs, strength) to LossWeights, in a file
    my.loss:softer   the same, in an importable module
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rl_training.entropy.changed_steps import Change
from rl_training.errors import UserError
from rl_training.interventions import reweighting as rw
from rl_training.interventions.custom import load_custom
from rl_training.interventions.loss import LossInputs, Reweighting
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.loss_weights import LossWeights

PLAIN = "plain"  # the unchanged step, in metrics' names
RATIOS_ARE_ONE = "on-policy every ratio is 1, so it changes nothing"
ENTROPY_TERMS = {"entropy_coef", "use_adaptive_entropy"}  # settings that leave the weights of log-probabilities alone
GROWS = "grows with the distance from the reference: one step shows little of it"
# What an intervention may need, each with the reason to report if it is missing.
_REASONS = {
    "dr_grpo": "the loss is not Dr-GRPO's, the only loss that it can change: set loss_type='dr_grpo', "
    "scale_rewards='none', beta=0 (trainer.… on the command line), and train without other interventions on these "
    "weights and without a subclass's loss",
    "advantages": "the loss weighs log-probabilities by more than advantages (beta=0, trainer.beta=0 on the command "
    "line, removes a KL term), or is not known",
    "unit": "the loss is not divided by Dr-GRPO's constant: set loss_type='dr_grpo' "
    "(trainer.loss_type=dr_grpo on the command line)",
    "rewards": "the rewards of these responses are not known",
    "whole_prompts": "it needs all responses to a prompt in one microbatch, and these are spread over several: set "
    "per_device_train_batch_size, or microbatch_size of measured_loop, to a multiple of the responses per prompt",
    "truncated": "which responses are truncated is not known here",
    "reference": "it needs the log-probabilities of a reference model, and there is none: full fine-tuning keeps one "
    "only with beta above 0; with an adapter it is the base model",
    "sampler": "the policy itself sampled these responses, or the sampler's log-probabilities are not known: train "
    "with vLLM, or in Python with a rollout_func that returns logprobs",
    "some_advantage": "all responses to each prompt have the same reward: there is no gradient to scale",
}
NEEDS = {need: Unavailable(f"intervention_needs_{need}", reason) for need, reason in _REASONS.items()}


SAMPLER = ("dr_grpo", "sampler")  # needs of corrections for a sampler other than the policy


@dataclass(frozen=True)
class Intervention:
    """A change of the loss's weights or of an optimizer setting, with its strength."""

    name: str  # in its metrics' names
    function: Reweighting | None  # maps a loss's inputs and the strength to new weights; None: an optimizer setting
    needs: tuple[str, ...] = ("advantages",)  # keys of NEEDS
    strength: float = math.nan  # nan: it has none
    low: float = 0.0  # strengths must be larger
    high: float = math.inf  # strengths must not be larger
    neutral_strength: float | None = None  # the strength at which it changes nothing; None: there is none
    is_linear: bool = False  # whether the new weights are linear in the strength
    nothing_on_policy: bool = False  # whether it changes nothing if all ratios are 1
    remark: str = ""  # a caveat on its one-step effect
    trl: str = ""  # the setting of trl.GRPOConfig that does the same, if any; for readers alone
    # What the strength is if there is no function: the factor on every learning rate, or the clipping threshold.
    sets: Literal["", "lr_factor", "max_grad_norm"] = ""
    is_entropy_bonus: bool = False  # whether it changes the weights of entropies alone
    # Whether it recalculates the weights from advantages and ratios, which undoes interventions before it.
    overwrites_weights: bool = False
    given: str = ""  # what the user wrote for it: also the file or module of a function of one's own

    @property
    def lr_factor(self) -> float:
        """The factor on every learning rate."""
        return self.strength if self.sets == "lr_factor" else 1.0

    @property
    def max_grad_norm(self) -> float | None:
        """The new clipping threshold; None: unchanged."""
        return self.strength if self.sets == "max_grad_norm" else None

    @property
    def differs(self) -> str:
        """What training with it adds to `LossSettings.differs`.

        "beta" stands for any term that is no weighted advantage.
        """
        if self.is_entropy_bonus:
            return "entropy_coef"
        return "intervention" if {"advantages", "dr_grpo"} & {*self.needs} else "beta"

    @property
    def change(self) -> Change:
        """How it changes the optimizer's step directly, if it does not change the loss's weights."""
        return Change(lr_factor=self.lr_factor, max_grad_norm=self.max_grad_norm)

    def unavailable_reason(self, loss: LossInputs) -> Unavailable | None:
        """Return the reason why it is not available with this loss, or None."""
        differs = {"not known"} if loss.settings is None else loss.settings.differs
        is_set = differs <= ENTROPY_TERMS  # the settings are Dr-GRPO's, so the weights must be
        has = {
            "dr_grpo": is_set and loss.is_dr_grpo,
            "advantages": differs.isdisjoint({"not known", "beta"}) and loss.is_of_advantages,
            "unit": differs.isdisjoint({"not known", "loss_type"}) and (loss.is_dr_grpo or not is_set),
            "rewards": loss.rewards is not None,
            "whole_prompts": loss.whole_prompts,
            "truncated": loss.truncated is not None,
            "reference": loss.reference_logps is not None,
            "sampler": loss.sampling_logps is not None,
            "some_advantage": loss.zero_advantage_share < 1.0,
        }
        return next((NEEDS[need] for need in self.needs if not has[need]), None)

    def weights(self, loss: LossInputs) -> LossWeights:
        """Return the new weights of a microbatch.

        Raises:
            UserError: If a user's own function fails. The message names it.
        """
        assert self.function is not None
        return self.function(loss, self.strength)


INTERVENTIONS: Mapping[str, Intervention] = {
    intervention.name: intervention
    for intervention in (
        Intervention("bonus", rw.bonus, (), strength=0.01, neutral_strength=0.0, is_linear=True, trl="entropy_coef",
                     is_entropy_bonus=True),
        Intervention("psr", rw.psr),
        Intervention("nsr", rw.nsr),
        Intervention("w_reinforce", rw.w_reinforce, strength=0.1, high=1.0, neutral_strength=1.0, is_linear=True),
        Intervention("std_norm", rw.std_norm, ("dr_grpo", "rewards", "whole_prompts"), trl="scale_rewards='group'"),
        Intervention("length_norm", rw.length_norm, ("dr_grpo",), trl="loss_type='grpo'"),
        Intervention("dynamic_sampling", rw.dynamic_sampling, ("advantages", "some_advantage")),
        Intervention("drop_truncated", rw.drop_truncated, ("advantages", "truncated"),
                     trl="mask_truncated_completions=True"),
        Intervention("keep_truncated", rw.keep_truncated, ("dr_grpo", "truncated", "rewards", "whole_prompts"),
                     trl="mask_truncated_completions=False"),
        Intervention("clip_cov", rw.clip_cov, strength=0.002, high=1.0),
        Intervention("kl_cov", rw.kl_cov, ("unit",), strength=0.002, high=1.0, nothing_on_policy=True),
        Intervention("top_entropy", rw.top_entropy, strength=0.2, high=1.0, trl="top_entropy_quantile"),
        Intervention("steer", rw.steer, strength=0.8, high=1.0),
        Intervention("kl", rw.kl, ("unit", "reference"), strength=0.04, neutral_strength=0.0, is_linear=True,
                     remark=GROWS, trl="beta"),
        Intervention("clip_higher", rw.clip_higher, ("dr_grpo",), strength=0.28, nothing_on_policy=True,
                     trl="epsilon_high", overwrites_weights=True),
        Intervention("none", rw.no_correction, SAMPLER, trl="vllm_importance_sampling_correction=False",
                     overwrites_weights=True),
        Intervention("tis", rw.token_truncation, SAMPLER, strength=2.0,
                     trl="vllm_importance_sampling_mode='token_truncate'", overwrites_weights=True),
        Intervention("mis", rw.token_mask, SAMPLER, strength=2.0, low=1.0,
                     trl="vllm_importance_sampling_mode='token_mask'", overwrites_weights=True),
        Intervention("seq_mask", rw.sequence_mask, SAMPLER, strength=3.0,
                     trl="vllm_importance_sampling_mode='sequence_mask'", overwrites_weights=True),
        Intervention("ppo_clip", rw.ppo_clip, SAMPLER, strength=0.2, overwrites_weights=True),
        Intervention("exact", rw.exact, SAMPLER, overwrites_weights=True),
        Intervention("lr", None, (), strength=0.5, neutral_strength=1.0, is_linear=True, trl="learning_rate",
                     sets="lr_factor"),
        Intervention("max_grad_norm", None, (), strength=0.1, trl="max_grad_norm", sets="max_grad_norm"),
    )
}  # fmt: skip
MUTUALLY_EXCLUSIVE = ({"psr", "nsr"}, {"drop_truncated", "keep_truncated"})  # one keeps what the other drops


def parse_interventions(names: Iterable[Any], setting: str) -> list[Intervention]:
    """Return the interventions with these names.

    Args:
        names: Names, each as `parse_intervention` takes them.
        setting: The name of the setting that lists them, with which error messages begin.

    Raises:
        UserError: If it is not a list of names, or if a name is unknown or occurs twice.

    >>> [intervention.name for intervention in parse_interventions(["psr", "lr:2"], "which")]
    ['psr', 'lr:2']
    """
    chosen = [parse_intervention(name) for name in list_of_names(names, setting)]
    duplicates = sorted(
        name for name, count in Counter(intervention.name for intervention in chosen).items() if count > 1
    )
    if duplicates:
        raise UserError(f"{setting} has {', '.join(duplicates)} twice: name each once")
    return chosen


def list_of_names(names: Any, setting: str) -> list[str]:
    """Return names of interventions as a list.

    Args:
        names: Any iterable of names.
        setting: The name of the setting that lists them, with which error messages begin.

    Raises:
        UserError: If it is not an iterable of texts, but a text or a dictionary, say.
    """
    if isinstance(names, str | Mapping) or not isinstance(names, Iterable):
        raise UserError(f"{setting}={names}: give a list of names, as {setting}=[bonus:0.02,lr]")
    listed = list(names)
    for name in listed:
        if not isinstance(name, str):
            raise UserError(
                f"{setting}: {name} is not a name: write NAME or NAME:STRENGTH, as {setting}=[bonus:0.02,lr]"
            )
    return listed


def interventions_to_train(names: Iterable[Any]) -> list[Intervention]:
    """Return the interventions that training applies, in this order.

    Raises:
        UserError: If two are of the same kind or contradict each other, or if one would undo those before it.
    """
    chosen = parse_interventions(names, "interventions")
    kinds = Counter(intervention.name.partition(":")[0] for intervention in chosen)
    for kind, count in kinds.items():
        if count > 1:
            raise UserError(f"interventions has {kind} with {count} strengths: give it one")
    for later in chosen[1:]:
        if later.overwrites_weights:
            raise UserError(
                f"interventions: {later.name} would undo those before it: put it first, and use only one of its kind"
            )
    for pair in MUTUALLY_EXCLUSIVE:
        if pair <= kinds.keys():
            raise UserError(f"interventions: {' and '.join(sorted(pair))} contradict each other: give one of them")
    return chosen


def parse_intervention(text: str) -> Intervention:
    """Return an intervention from name[:strength], FILE.py:FUNCTION[:strength] or MODULE:FUNCTION[:strength].

    Raises:
        UserError: If the name is unknown, or the strength is out of bounds.

    >>> parse_intervention("bonus").strength, parse_intervention("lr:2").strength
    (0.01, 2.0)
    """
    return dataclasses.replace(_parse(text), given=text)


def _parse(text: str) -> Intervention:
    name, _, strength = text.partition(":")
    if name in INTERVENTIONS:
        intervention = INTERVENTIONS[name]
    elif "." in name or strength.partition(":")[0].isidentifier():
        function, _, strength = strength.partition(":")
        if function in (PLAIN, *INTERVENTIONS):
            raise UserError(f"{text}: {function} is already a name in the metrics: rename the function")
        intervention = Intervention(function, load_custom(name, function), (), strength=1.0, low=-math.inf)
    else:
        close = difflib.get_close_matches(name, INTERVENTIONS, n=1, cutoff=0.5)
        names = ", ".join(INTERVENTIONS)
        hint = f"did you mean {close[0]}?" if close else f"choose from {names}, or give FILE.py:FUNCTION"
        raise UserError(f"unknown intervention {name!r}: {hint}")
    if name == "mis" and "," in strength:  # both bounds
        bounds = [_checked_strength(dataclasses.replace(intervention, low=0.0), bound) for bound in strength.split(",")]
        if len(bounds) != 2 or bounds[0] >= bounds[1]:
            raise UserError(f"{text}: give the lower bound and the upper, as in mis:0.5,2")
        masked = functools.partial(rw.token_mask, low=bounds[0])
        return dataclasses.replace(intervention, name=text, function=masked, strength=bounds[1])
    if not strength and not text.endswith(":"):
        return intervention
    return dataclasses.replace(
        intervention, name=f"{intervention.name}:{strength}", strength=_checked_strength(intervention, strength)
    )


def _checked_strength(intervention: Intervention, text: str) -> float:
    """Return the strength in `text`. Raise UserError if it is no number, out of bounds, or the neutral one."""
    full = f"{intervention.name}:{text}"
    if math.isnan(intervention.strength):
        raise UserError(f"{full}: {intervention.name} has no strength, write {intervention.name}")
    try:
        value = float(text)
    except ValueError:
        raise UserError(
            f"{full}: the strength must be a number, as in {intervention.name}:{intervention.strength:g}"
        ) from None
    if not intervention.low < value < math.inf or value > intervention.high or value == intervention.neutral_strength:
        bounds = f"above {intervention.low:g}" + (
            "" if math.isinf(intervention.high) else f", at most {intervention.high:g}"
        )
        no_effect = (
            ""
            if intervention.neutral_strength is None
            else f", and not {intervention.neutral_strength:g}, which has no effect"
        )
        raise UserError(f"{full}: the strength must lie {bounds}{no_effect}")
    return value

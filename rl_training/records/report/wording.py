"""What to change, as text: settings in the words of whichever trainer made the run, ready to paste."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_training.records.hydra_text import quote_list, quote_override, quote_value
from rl_training.records.made_by import JOB, LOOP, TRL, VERL
from rl_training.records.report.set_up import KEPT_STEP, PSR, SetUp, set_up_of
from rl_training.records.table.effects import Effect
from rl_training.records.table.series import Run, once_per_run
from rl_training.vocabulary import AUTO, MAX_SHARE

OPEN = "…"  # in a value that the user has to fill in
SMALLER = 1 / 3  # times the share, or the rate, of a run whose steps are too large
PSR_PAGE = "docs/how_to/keep_entropy_up.md"  # which has it as a subclass of TRL's trainer
# By intervention: the field of GRPOConfig that does the same, and its value; None for the intervention's strength.
TRL_FIELDS: Mapping[str, tuple[str, Any]] = {
    "bonus": ("entropy_coef", None), "max_grad_norm": ("max_grad_norm", None),
    "top_entropy": ("top_entropy_quantile", None), "kl": ("beta", None), "clip_higher": ("epsilon_high", None),
    "std_norm": ("scale_rewards", "group"), "length_norm": ("loss_type", "grpo"),
    "drop_truncated": ("mask_truncated_completions", True), "keep_truncated": ("mask_truncated_completions", False),
}  # fmt: skip
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL_NAMES = {  # by field of GRPOConfig
    "learning_rate": f"{ACTOR}.optim.lr", "weight_decay": f"{ACTOR}.optim.weight_decay",
    "max_grad_norm": f"{ACTOR}.grad_clip", "entropy_coef": f"{ACTOR}.entropy_coeff", "beta": f"{ACTOR}.kl_loss_coef",
    "epsilon_high": f"{ACTOR}.clip_ratio_high",
    "max_completion_length": "data.max_response_length", "num_generations": f"{ROLLOUT}.n",
    "temperature": f"{ROLLOUT}.temperature", "top_p": f"{ROLLOUT}.top_p", "top_k": f"{ROLLOUT}.top_k",
}  # fmt: skip
VERL_KL = f"{ACTOR}.use_kl_loss=True"  # without it the coefficient has no effect


@dataclass(frozen=True)
class Advice:
    """What to do.

    Args:
        text: What to change, as part of a sentence, such as "GRPOConfig(beta=0.1)"; or else a whole sentence.
        settings: The parts of the text that can be pasted. A page marks them.
        is_setting: Whether the text names what to change, and is no whole sentence.
    """

    text: str
    settings: tuple[str, ...] = ()
    is_setting: bool = True

    @classmethod
    def to_do(cls, sentence: str, *parts: Advice) -> Advice:
        """Return a whole sentence, with the settings of the parts that it is made of."""
        return cls(sentence, tuple(setting for part in parts for setting in part.settings), is_setting=False)

    def followed_by(self, words: str) -> Advice:
        return Advice(self.text + words, self.settings, self.is_setting)

    @property
    def sentence(self) -> str:
        return self.as_a_change("Setting").text

    def as_a_change(self, start: str = "To change") -> Advice:
        """Return it as a whole sentence, which begins with `start` if it names what to change."""
        return Advice.to_do(f"{start}: {self.text}.", self) if self.is_setting else self


class Wording:
    """The text of settings for a loop of one's own. Each kind of trainer has a subclass, which says it its own way."""

    responses_name = "responses_per_prompt"  # as a loop records them

    def __init__(self, set_up: SetUp) -> None:
        self.set_up = set_up

    @property
    def rate_name(self) -> str:
        return "the learning rate"

    def fields(self, **fields: Any) -> Advice:
        """Return what sets these fields, which are named as in GRPOConfig."""
        return _settings([f"{name}={value}" for name, value in fields.items()], ", ")

    def sample_with(self, **fields: Any) -> Advice:
        """Return what makes the sampler use these fields: in `generation_kwargs` where they are set there."""
        apart = {name: value for name, value in fields.items() if name in self.set_up.of_generation}
        shared = {name: value for name, value in fields.items() if name not in apart}
        return self._sample_with(shared, apart)

    def _sample_with(self, shared: dict[str, Any], apart: dict[str, Any]) -> Advice:
        merged = {"generation_kwargs": self.set_up.of_generation | apart} if apart else {}
        return self.fields(**shared, **merged)

    def larger_batch(self, times: int) -> Advice:
        """Return what multiplies the prompts of a step by `times`."""
        return Advice(f"{times} times as many prompts in a step")

    def bounded_step(self, times: float = SMALLER) -> Advice:
        """Return what bounds how far a step moves the policy.

        Args:
            times: Factor on the share of a run that has the bound already.
        """
        set_up = self.set_up
        if set_up.aimed_at > MAX_SHARE and times < 1:  # no share can be set as high
            return Advice(
                f"a schedule that never exceeds its first rate (this one made of {KEPT_STEP} targets of up to "
                f"{set_up.aimed_at:.2g} times the entropy)"
            )
        return self._bounded_to(rounded(min(times * set_up.share, MAX_SHARE)) if set_up.is_bounded else AUTO)

    def _bounded_to(self, share: float | str) -> Advice:
        return _argument("measured_loop", f"{KEPT_STEP}={_in_python(share)}")

    def smaller_steps(self) -> Advice:
        """Return what makes steps smaller; under the bound, the rate does not."""
        return self.bounded_step().followed_by(", or a lower learning rate" * (not self.set_up.is_bounded))

    def larger_steps(self) -> Advice:
        if self.set_up.is_bounded:
            return self.bounded_step(times=1 / SMALLER)
        rate = self.set_up.rate
        if not math.isfinite(rate):
            return Advice("a higher learning rate")
        return self.fields(learning_rate=rounded(rate / SMALLER))

    def longer_responses(self) -> Advice:
        """Return what doubles the maximum length of a response."""
        length = self.set_up.number("max_completion_length")
        return self.fields(max_completion_length=int(2 * length) if math.isfinite(length) else OPEN)

    def more_unequal_rewards(self) -> Advice:
        """Return what makes more prompts have responses with unequal rewards."""
        responses = self.set_up.responses
        return self.fields(**{self.responses_name: int(2 * responses) if math.isfinite(responses) else OPEN})

    def reward_weights(self) -> Advice:
        """Return what weighs several reward functions."""
        return Advice("the weights of your rewards")

    def positive_only(self) -> Advice:
        """Return what trains on positive advantages only."""
        return Advice("clamp advantages to at least 0")

    def intervention(self, effect: Effect) -> Advice:
        """Return what trains with an intervention, at the strength that halves the fall or else as measured."""
        strength = effect.advised_strength
        if effect.bare_name == "lr" and strength and math.isfinite(self.set_up.rate):
            return self.fields(learning_rate=rounded(float(strength) * self.set_up.rate))
        name = f"{effect.bare_name}{f':{strength}' * bool(strength)}"
        return self._instead_of(effect.bare_name, strength) or Advice(name)

    def _instead_of(self, name: str, strength: str) -> Advice | None:
        """Return the trainer's own field that does what an intervention does, or None."""
        return None

    def probes(self, *names: str) -> Advice:
        """Return what adds probes."""
        return _settings([f"probes={json.dumps(_with_simple(names))}"])

    def branch_from(self, checkpoint: Path) -> str:
        """Return the setting that branches off from a checkpoint, "" without such a setting."""
        return ""


class TrlWording(Wording):
    """For a TRL trainer with attached probes: arguments of GRPOConfig and `attach`."""

    responses_name = "num_generations"

    def fields(self, **fields: Any) -> Advice:
        texts = [f"{name}={_in_python(value)}" for name, value in fields.items()]
        return _settings([f"GRPOConfig({', '.join(texts)})"])

    def larger_batch(self, times: int) -> Advice:
        accumulated = self.set_up.number("gradient_accumulation_steps")
        if not math.isfinite(accumulated):
            return super().larger_batch(times)
        return self.fields(gradient_accumulation_steps=times * int(accumulated))

    def _bounded_to(self, share: float | str) -> Advice:
        return _argument("attach", f"{KEPT_STEP}={_in_python(share)}")

    def reward_weights(self) -> Advice:
        return self.fields(reward_weights=f"[{OPEN}]")

    def positive_only(self) -> Advice:
        return Advice(f"PositiveOnly(GRPOTrainer) of {PSR_PAGE}")

    def _instead_of(self, name: str, strength: str) -> Advice | None:
        field, value = TRL_FIELDS.get(name, ("", None))
        if not field or (value is None and not strength):
            return None
        return _settings([f"GRPOConfig({field}={strength if value is None else _in_python(value)})"])


class DrGrpoWording(TrlWording):
    """For a DrGRPOTrainer of one's own script, which has the bound and interventions itself."""

    def _bounded_to(self, share: float | str) -> Advice:
        return _settings([f"DrGRPOConfig({KEPT_STEP}={_in_python(share)})"])

    def positive_only(self) -> Advice:
        return _argument("DrGRPOTrainer", f'interventions=["{PSR}"]')


class JobWording(Wording):
    """For `rl-training train`: Hydra's overrides."""

    @property
    def rate_name(self) -> str:
        return "trainer.learning_rate"

    def fields(self, **fields: Any) -> Advice:
        return _settings([f"trainer.{name}={value}" for name, value in fields.items()])

    def _sample_with(self, shared: dict[str, Any], apart: dict[str, Any]) -> Advice:
        return self.fields(**shared, **{f"generation_kwargs.{name}": value for name, value in apart.items()})

    def larger_batch(self, times: int) -> Advice:
        if not math.isfinite(self.set_up.sequences):
            return super().larger_batch(times)
        return _settings([f"batch.sequences_per_step={times * self.set_up.sequences:.0f}"])

    def _bounded_to(self, share: float | str) -> Advice:
        return self.fields(**{KEPT_STEP: share})

    def more_unequal_rewards(self) -> Advice:
        return _settings(["buffer=filtered"])

    def reward_weights(self) -> Advice:
        return self.fields(reward_weights=f"[{OPEN}]")

    def positive_only(self) -> Advice:
        return self._train_with(PSR)

    def intervention(self, effect: Effect) -> Advice:
        return self._train_with(self.set_up.name_as_configured(effect))

    def _train_with(self, name: str) -> Advice:
        names = self.set_up.interventions_with(name)
        value = quote_value(name) if names == [name] else quote_list(names)
        return _settings([shlex.quote(f"intervention={value}")])

    def probes(self, *names: str) -> Advice:
        return _settings([_probe_override(names)])

    def branch_from(self, checkpoint: Path) -> str:
        return quote_override("branch", str(checkpoint))


class VerlWording(Wording):
    """For verl: overrides of its configuration, which has no bounded step and no interventions."""

    responses_name = "num_generations"

    @property
    def rate_name(self) -> str:
        return VERL_NAMES["learning_rate"]

    def fields(self, **fields: Any) -> Advice:
        texts = [f"{VERL_NAMES.get(name, name)}={value}" for name, value in fields.items()]
        known = [text for text, name in zip(texts, fields, strict=True) if name in VERL_NAMES]
        return Advice(" ".join(texts), _settings(known).settings)

    def bounded_step(self, times: float = SMALLER) -> Advice:
        rate = self.set_up.rate
        return self.fields(learning_rate=rounded(times * rate) if math.isfinite(rate) else OPEN)

    def smaller_steps(self) -> Advice:
        return self.bounded_step()  # it is a lower rate already

    def _instead_of(self, name: str, strength: str) -> Advice | None:
        field, value = TRL_FIELDS.get(name, ("", None))
        if VERL_NAMES.get(field) is None or value is not None or not strength:
            return None
        setting = f"{VERL_NAMES[field]}={strength}"
        return _settings([VERL_KL, setting] if name == "kl" else [setting])

    def probes(self, *names: str) -> Advice:
        return _settings([_probe_override(names)])


@once_per_run
def wording_of(run: Run) -> Wording:
    """Return how settings of a run are written."""
    set_up = set_up_of(run)
    of_trl = DrGrpoWording if "DrGRPO" in set_up.trainer_class else TrlWording
    kinds: dict[str, Callable[[SetUp], Wording]] = {JOB: JobWording, TRL: of_trl, VERL: VerlWording, LOOP: Wording}
    return kinds[set_up.kind](set_up)


def _settings(texts: list[str], separator: str = " ") -> Advice:
    """Return settings one after the other. One with a value to fill in cannot be pasted."""
    return Advice(separator.join(texts), tuple(text for text in texts if OPEN not in text))


def _argument(call: str, argument: str) -> Advice:
    """Return an argument to add to a call that the user's script has."""
    return Advice(f"{call}({OPEN}, {argument})", (argument,))


def _probe_override(names: tuple[str, ...]) -> str:
    return shlex.quote(f"probe={quote_list(_with_simple(names))}")


def _with_simple(names: tuple[str, ...]) -> list[str]:
    return ["simple", *(name for name in names if name != "simple")]


def rounded(proposed: float) -> float:
    """Return a new value for a setting with two digits. A value that the run has already is written as it is."""
    return float(f"{proposed:.2g}")


def _in_python(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) and OPEN not in value else str(value)

"""What to change, as text: settings in the words of whichever trainer made the run, ready to paste."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_training.records.hydra_text import quote_list, quote_override, quote_value
from rl_training.records.made_by import JOB, LOOP, TRL, VERL
from rl_training.records.report.proposals import Change
from rl_training.records.report.set_up import KEPT_STEP, PSR, SetUp, set_up_of
from rl_training.records.table.effects import Effect
from rl_training.records.table.series import Run, once_per_run
from rl_training.vocabulary import AUTO, MAX_SHARE

# Targets of changes that no field of GRPOConfig makes.
BATCH = "batch"
LOSS = "loss"
PROBES = "probes"
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


class Wording:
    """The text of settings for a loop of one's own. Each kind of trainer has a subclass, which says it its own way."""

    responses_name = "responses_per_prompt"  # as a loop records them

    def __init__(self, set_up: SetUp) -> None:
        self.set_up = set_up

    @property
    def rate_name(self) -> str:
        return "the learning rate"

    def fields(self, **fields: Any) -> Change:
        """Return what sets these fields, which are named as in GRPOConfig."""
        return _change(fields, [f"{name}={value}" for name, value in fields.items()], ", ")

    def sample_with(self, **fields: Any) -> Change:
        """Return what makes the sampler use these fields: in `generation_kwargs` where they are set there."""
        apart = {name: value for name, value in fields.items() if name in self.set_up.of_generation}
        shared = {name: value for name, value in fields.items() if name not in apart}
        return self._sample_with(shared, apart)

    def _sample_with(self, shared: dict[str, Any], apart: dict[str, Any]) -> Change:
        merged = {"generation_kwargs": self.set_up.of_generation | apart} if apart else {}
        return self.fields(**shared, **merged)

    def larger_batch(self, times: int) -> Change:
        """Return what multiplies the prompts of a step by `times`."""
        return Change(f"{times} times as many prompts in a step", target=BATCH)

    def bounded_step(self, times: float = SMALLER) -> Change:
        """Return what bounds how far a step moves the policy.

        Args:
            times: Factor on the share of a run that has the bound already.
        """
        set_up = self.set_up
        if set_up.aimed_at > MAX_SHARE and times < 1:  # no share can be set as high
            return Change(
                f"a schedule that never exceeds its first rate (this one made of {KEPT_STEP} targets of up to "
                f"{set_up.aimed_at:.2g} times the entropy)",
                target="lr_scheduler_type",
            )
        return self._bounded_to(rounded(min(times * set_up.share, MAX_SHARE)) if set_up.is_bounded else AUTO)

    def _bounded_to(self, share: float | str) -> Change:
        return _argument(KEPT_STEP, "measured_loop", f"{KEPT_STEP}={_in_python(share)}")

    def smaller_steps(self) -> Change:
        """Return what makes steps smaller; under the bound, the rate does not."""
        return self.bounded_step().followed_by(", or a lower learning rate" * (not self.set_up.is_bounded))

    def larger_steps(self) -> Change:
        if self.set_up.is_bounded:
            return self.bounded_step(times=1 / SMALLER)
        rate = self.set_up.rate
        if not math.isfinite(rate):
            return Change("a higher learning rate", target="learning_rate")
        return self.fields(learning_rate=rounded(rate / SMALLER))

    def longer_responses(self) -> Change:
        """Return what doubles the maximum length of a response."""
        length = self.set_up.number("max_completion_length")
        return self.fields(max_completion_length=int(2 * length) if math.isfinite(length) else OPEN)

    def more_unequal_rewards(self) -> Change:
        """Return what makes more prompts have responses with unequal rewards."""
        responses = self.set_up.responses
        return self.fields(**{self.responses_name: int(2 * responses) if math.isfinite(responses) else OPEN})

    def reward_weights(self) -> Change:
        """Return what weighs several reward functions."""
        return Change("the weights of your rewards", target="reward_weights")

    def positive_only(self) -> Change:
        """Return what trains on positive advantages only."""
        return Change("clamp advantages to at least 0", target=LOSS)

    def intervention(self, effect: Effect) -> Change:
        """Return what trains with an intervention, at the strength that halves the fall or else as measured."""
        strength = effect.advised_strength
        if effect.bare_name == "lr" and strength and math.isfinite(self.set_up.rate):
            return self.fields(learning_rate=rounded(float(strength) * self.set_up.rate))
        name = f"{effect.bare_name}{f':{strength}' * bool(strength)}"
        return self._instead_of(effect.bare_name, strength) or Change(name, target=LOSS)

    def _instead_of(self, name: str, strength: str) -> Change | None:
        """Return the trainer's own field that does what an intervention does, or None."""
        return None

    def probes(self, *names: str) -> Change:
        """Return what adds probes."""
        return _change([PROBES], [f"probes={json.dumps(_with_simple(names))}"])

    def branch_from(self, checkpoint: Path) -> str:
        """Return the setting that branches off from a checkpoint, "" without such a setting."""
        return ""


class TrlWording(Wording):
    """For a TRL trainer with attached probes: arguments of GRPOConfig and `attach`."""

    responses_name = "num_generations"

    def fields(self, **fields: Any) -> Change:
        texts = [f"{name}={_in_python(value)}" for name, value in fields.items()]
        return _change(fields, [f"GRPOConfig({', '.join(texts)})"])

    def larger_batch(self, times: int) -> Change:
        accumulated = self.set_up.number("gradient_accumulation_steps")
        if not math.isfinite(accumulated):
            return super().larger_batch(times)
        return self.fields(gradient_accumulation_steps=times * int(accumulated))

    def _bounded_to(self, share: float | str) -> Change:
        return _argument(KEPT_STEP, "attach", f"{KEPT_STEP}={_in_python(share)}")

    def reward_weights(self) -> Change:
        return self.fields(reward_weights=f"[{OPEN}]")

    def positive_only(self) -> Change:
        return Change(f"PositiveOnly(GRPOTrainer) of {PSR_PAGE}", target=LOSS)

    def _instead_of(self, name: str, strength: str) -> Change | None:
        field, value = TRL_FIELDS.get(name, ("", None))
        if not field or (value is None and not strength):
            return None
        return _change([field], [f"GRPOConfig({field}={strength if value is None else _in_python(value)})"])


class DrGrpoWording(TrlWording):
    """For a DrGRPOTrainer of one's own script, which has the bound and interventions itself."""

    def _bounded_to(self, share: float | str) -> Change:
        return _change([KEPT_STEP], [f"DrGRPOConfig({KEPT_STEP}={_in_python(share)})"])

    def positive_only(self) -> Change:
        return _argument(LOSS, "DrGRPOTrainer", f'interventions=["{PSR}"]')


class JobWording(Wording):
    """For `rl-training train`: Hydra's overrides."""

    @property
    def rate_name(self) -> str:
        return "trainer.learning_rate"

    def fields(self, **fields: Any) -> Change:
        return _change(fields, [f"trainer.{name}={value}" for name, value in fields.items()])

    def _sample_with(self, shared: dict[str, Any], apart: dict[str, Any]) -> Change:
        return self.fields(**shared, **{f"generation_kwargs.{name}": value for name, value in apart.items()})

    def larger_batch(self, times: int) -> Change:
        if not math.isfinite(self.set_up.sequences):
            return super().larger_batch(times)
        return _change([BATCH], [f"batch.sequences_per_step={times * self.set_up.sequences:.0f}"])

    def _bounded_to(self, share: float | str) -> Change:
        return self.fields(**{KEPT_STEP: share})

    def more_unequal_rewards(self) -> Change:
        return _change(["buffer"], ["buffer=filtered"])

    def reward_weights(self) -> Change:
        return self.fields(reward_weights=f"[{OPEN}]")

    def positive_only(self) -> Change:
        return self._train_with(PSR)

    def intervention(self, effect: Effect) -> Change:
        return self._train_with(self.set_up.name_as_configured(effect))

    def _train_with(self, name: str) -> Change:
        names = self.set_up.interventions_with(name)
        value = quote_value(name) if names == [name] else quote_list(names)
        return _change([LOSS], [shlex.quote(f"intervention={value}")])

    def probes(self, *names: str) -> Change:
        return _change([PROBES], [_probe_override(names)])

    def branch_from(self, checkpoint: Path) -> str:
        return quote_override("branch", str(checkpoint))


class VerlWording(Wording):
    """For verl: overrides of its configuration, which has no bounded step and no interventions."""

    responses_name = "num_generations"

    @property
    def rate_name(self) -> str:
        return VERL_NAMES["learning_rate"]

    def fields(self, **fields: Any) -> Change:
        texts = [f"{VERL_NAMES.get(name, name)}={value}" for name, value in fields.items()]
        known = [text for text, name in zip(texts, fields, strict=True) if name in VERL_NAMES]
        return replace(_change(fields, known), text=" ".join(texts))

    def bounded_step(self, times: float = SMALLER) -> Change:
        rate = self.set_up.rate
        return self.fields(learning_rate=rounded(times * rate) if math.isfinite(rate) else OPEN)

    def smaller_steps(self) -> Change:
        return self.bounded_step()  # it is a lower rate already

    def _instead_of(self, name: str, strength: str) -> Change | None:
        field, value = TRL_FIELDS.get(name, ("", None))
        if VERL_NAMES.get(field) is None or value is not None or not strength:
            return None
        setting = f"{VERL_NAMES[field]}={strength}"
        return _change([field], [VERL_KL, setting] if name == "kl" else [setting])

    def probes(self, *names: str) -> Change:
        return _change([PROBES], [_probe_override(names)])


@once_per_run
def wording_of(run: Run) -> Wording:
    """Return how settings of a run are written."""
    set_up = set_up_of(run)
    of_trl = DrGrpoWording if "DrGRPO" in set_up.trainer_class else TrlWording
    kinds: dict[str, Callable[[SetUp], Wording]] = {JOB: JobWording, TRL: of_trl, VERL: VerlWording, LOOP: Wording}
    return kinds[set_up.kind](set_up)


def _change(targets: Iterable[str], texts: list[str], separator: str = " ") -> Change:
    """Return the change of these targets by settings one after the other. One with a value to fill in is not pasted."""
    pasted = tuple(text for text in texts if OPEN not in text)
    return Change(separator.join(texts), pasted, target=", ".join(targets))


def _argument(target: str, call: str, argument: str) -> Change:
    """Return an argument to add to a call that the user's script has."""
    return Change(f"{call}({OPEN}, {argument})", (argument,), target=target)


def _probe_override(names: tuple[str, ...]) -> str:
    return shlex.quote(f"probe={quote_list(_with_simple(names))}")


def _with_simple(names: tuple[str, ...]) -> list[str]:
    return ["simple", *(name for name in names if name != "simple")]


def rounded(proposed: float) -> float:
    """Return a new value for a setting with two digits. A value that the run has already is written as it is."""
    return float(f"{proposed:.2g}")


def _in_python(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) and OPEN not in value else str(value)

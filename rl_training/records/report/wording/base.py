"""Settings to change, in words for a loop of one's own: what each kind of trainer says its own way."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rl_training.records.hydra_text import quote_list
from rl_training.records.report.proposals import Change
from rl_training.records.report.set_up import KEPT_STEP, SetUp
from rl_training.records.table.effects import Effect
from rl_training.records.table.series import Run
from rl_training.vocabulary import AUTO, MAX_SHARE

# Targets of changes that no field of GRPOConfig makes.
BATCH = "batch"
LOSS = "loss"
PROBES = "probes"
OPEN = "…"  # in a value that the user has to fill in
MAX_PROPOSALS = 4  # interventions that are proposed to be tried
SURELY_RAISED = 2.0  # times MAX_SHARE: the trainer may log another mean of entropy than the bound is a share of
SMALLER = 1 / 3  # times the share, or the rate, of a run whose steps are too large; chosen by hand


class Wording:
    """The text of settings for a loop of one's own. Each kind of trainer has a subclass, in a file of its own."""

    responses_name = "responses_per_prompt"  # as a loop records them

    def __init__(self, set_up: SetUp) -> None:
        self.set_up = set_up

    @property
    def rate_name(self) -> str:
        return "the learning rate"

    def fields(self, **fields: Any) -> Change:
        """Return what sets these fields, which are named as in GRPOConfig."""
        return change_of(fields, [f"{name}={value}" for name, value in fields.items()], ", ")

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
        if set_up.aimed_at > SURELY_RAISED * MAX_SHARE and times < 1:  # no share can be set as high
            return Change(
                f"a schedule that never exceeds its first rate (this one made of {KEPT_STEP} targets of up to "
                f"{set_up.aimed_at:.2g} times the entropy)",
                target="lr_scheduler_type",
            )
        return self._bounded_to(rounded(min(times * set_up.share, MAX_SHARE)) if set_up.is_bounded else AUTO)

    def _bounded_to(self, share: float | str) -> Change:
        return argument_of(KEPT_STEP, "measured_loop", f"{KEPT_STEP}={in_python(share)}")

    def smaller_steps(self) -> Change:
        """Return what makes steps smaller; under the bound, the rate does not."""
        step = self.bounded_step()
        return step if self.set_up.is_bounded else step.followed_by(", or a lower learning rate")

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
        name = f"{effect.bare_name}:{strength}" if strength else effect.bare_name
        return self._trainers_own(effect.bare_name, strength) or Change(name, target=LOSS)

    def _trainers_own(self, name: str, strength: str) -> Change | None:
        """Return the trainer's own field that does what an intervention does, or None."""
        return None

    def probes(self, *names: str) -> Change:
        """Return what adds probes."""
        return change_of([PROBES], [f"probes={json.dumps(with_simple(names))}"])

    def branches(self, run: Run, preferred: Sequence[tuple[str, Effect]]) -> list[str]:
        """Return the lines that train a branch unchanged, and branches with an intervention, and compare them.

        Args:
            run: The run, whose settings these are.
            preferred: Values of the setting `intervention` to try, at least one, with their effects.
        """
        return []

    def branch_from(self, checkpoint: Path) -> str:
        """Return the setting that branches off from a checkpoint, "" without such a setting."""
        return ""


def branch_folder(run: Run, name: str) -> Path:
    """Return the folder, beside the run's, of a branch with this name."""
    return Path(f"{run.folder}_{re.sub(r'[^A-Za-z0-9_.]+', '_', name)}")


def change_of(targets: Iterable[str], texts: list[str], separator: str = " ") -> Change:
    """Return the change of these targets by settings one after the other. One with a value to fill in is not pasted."""
    pasted = tuple(text for text in texts if OPEN not in text)
    return Change(separator.join(texts), pasted, target=", ".join(targets))


def argument_of(target: str, call: str, argument: str) -> Change:
    """Return an argument to add to a call that the user's script has."""
    return Change(f"{call}({OPEN}, {argument})", (argument,), target=target)


def probe_override(names: tuple[str, ...]) -> str:
    """Return Hydra's override that adds these probes, quoted for a shell."""
    return shlex.quote(f"probe={quote_list(with_simple(names))}")


def with_simple(names: tuple[str, ...]) -> list[str]:
    """Return the names of probes to run: `simple` and these."""
    return ["simple", *(name for name in names if name != "simple")]


def rounded(proposed: float) -> float:
    """Return a new value for a setting with two digits. A value that the run has already is written as it is."""
    return float(f"{proposed:.2g}")


def in_python(value: Any) -> str:
    """Return a value as Python reads it; one to fill in as it is."""
    return json.dumps(value) if isinstance(value, str) and OPEN not in value else str(value)

"""How a run is set up: its recorded settings, whichever trainer made it. wording/ writes settings to change."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import pandas as pd

from rl_training.options import is_number
from rl_training.records.made_by import made_by
from rl_training.records.table.effects import Effect
from rl_training.records.table.series import Run, once_per_run
from rl_training.vocabulary import AUTO, AUTO_SHARE

PSR = "psr"  # the intervention that trains on positive advantages only
SIGNS = {PSR, "nsr", "w_reinforce"}  # each weighs advantages by their sign: a run has at most one
KEPT_STEP = "target_kl_share"
STRENGTH = re.compile(r":\d[\d.,e+-]*$")  # at the end of an intervention's name


@dataclass(frozen=True)
class SetUp:
    """The settings of a run, whichever trainer made it.

    Args:
        kind: What made the run: JOB, TRL, VERL or LOOP.
        settings: All recorded settings.
        share: The KL that the steps are bounded to, as a share of entropy; nan if they are not bounded.
        aimed_at: The largest such share that the schedule of the rate has made of it; nan if that is unknown.
    """

    kind: str
    settings: dict[str, Any]
    share: float = math.nan
    aimed_at: float = math.nan

    def recorded(self, group: str, name: str) -> Any:
        """Return the setting GROUP.NAME, or NAME from records without that group; None if it is not recorded."""
        fields = self.settings.get(group)
        return fields.get(name) if isinstance(fields, dict) else self.settings.get(name)

    def trainer(self, name: str, default: Any = None) -> Any:
        """Return a field of GRPOConfig; `default` if it is None or not recorded."""
        value = self.recorded("trainer", name)
        return default if value is None else value

    def number(self, name: str, default: float = math.nan) -> float:
        """Return a field of GRPOConfig that is a number; otherwise `default`."""
        return _as_number(self.trainer(name), default)

    def optimizer(self, name: str) -> float:
        """Return a setting of the optimizer, as loops record it; nan if it is not recorded."""
        return _as_number(self.recorded("optimizer", name))

    @property
    def rate(self) -> float:
        """The learning rate that was asked for; nan if it is not recorded."""
        return self.number("learning_rate", self.optimizer("lr"))

    @property
    def trainer_class(self) -> str:
        """The name of a TRL trainer's class; "" for another trainer."""
        return str(self.trainer("class", ""))

    @property
    def sequences(self) -> float:
        """Sequences per optimizer step, over all ranks; nan if not recorded."""
        return _as_number(self.recorded("batch", "sequences_per_step"))

    @property
    def trained_parameters(self) -> int | None:
        """Number of trained parameters; None if not recorded."""
        value = self.recorded("model", "trained_parameters")
        return value if isinstance(value, int) else None

    @property
    def responses(self) -> float:
        """Responses per prompt; nan if not recorded."""
        return self.number("num_generations", self.number("responses_per_prompt"))

    @property
    def prompts(self) -> float:
        """Prompts per optimizer step; nan if not recorded."""
        return self.sequences / self.responses if self.responses > 0 else math.nan

    @property
    def of_generation(self) -> dict[str, Any]:
        """The settings in `generation_kwargs`, which only the sampler has."""
        settings = self.trainer("generation_kwargs")
        return dict(settings) if isinstance(settings, dict) else {}

    @property
    def is_bounded(self) -> bool:
        return not math.isnan(self.share)

    @property
    def interventions(self) -> list[str]:
        """The interventions that the run trains with, by name."""
        setting = self.settings.get("intervention") or self.recorded("attached", "interventions")
        names = setting if isinstance(setting, list) else [setting]
        of_class = [PSR] if "PositiveOnly" in self.trainer_class else []
        return of_class + [str(name) for name in names if name]

    @property
    def has_sign_intervention(self) -> bool:
        """Whether an intervention of the run weighs advantages by their sign."""
        return any(_without_strength(name) in SIGNS for name in self.interventions)

    def interventions_with(self, name: str) -> list[str]:
        """Return the run's interventions and this one, which takes the place of one that cannot be beside it."""
        bare_name = _without_strength(name)
        excluded = {bare_name, *(SIGNS if bare_name in SIGNS else ())}
        return [*(other for other in self.interventions if _without_strength(other) not in excluded), name]

    def name_as_configured(self, effect: Effect) -> str:
        """Return the value of the setting `intervention` that trains with a measured intervention.

        It has the file or module that the probe's setting names, and the strength that halves the fall if that is
        known.
        """
        probes = self.settings.get("probes")
        probe = probes.get("interventions") if isinstance(probes, dict) else None
        which = probe.get("which") if isinstance(probe, dict) else None
        names = [str(name) for name in which] if isinstance(which, list) else []
        configured = next((name for name in names if name.endswith(f":{effect.name}")), effect.name)
        if not math.isfinite(effect.halves_at.value):
            return configured
        return f"{configured.removesuffix(effect.name)}{effect.bare_name}:{effect.advised_strength}"


@once_per_run
def set_up_of(run: Run) -> SetUp:
    """Return the settings of a run."""
    shares = _target_shares(run)
    largest = float(shares.max()) if len(shares) else math.nan
    return SetUp(made_by(run.settings), run.settings, share=_kept_share(run, shares), aimed_at=largest)


def _as_number(value: Any, default: float = math.nan) -> float:
    return float(value) if is_number(value) else default


def _without_strength(name: str) -> str:
    return STRENGTH.sub("", name)


def _target_shares(run: Run) -> pd.Series[float]:
    """Return the KL that each step was bounded to, as a share of entropy, by step; empty without a bound."""
    (targets, entropy) = run.values("bound/target_kl").align(run.token_entropy(), join="inner")
    return (targets / entropy)[entropy > 0]


def _kept_share(run: Run, shares: pd.Series[float]) -> float:
    """Return the share of entropy that steps are bounded to; nan if they are not.

    One that is not recorded is read off the targets, and is AUTO_SHARE at most.
    """
    groups = (run.settings.get("attached"), run.settings.get("trainer"), run.settings)
    setting = next((group[KEPT_STEP] for group in groups if isinstance(group, dict) and group.get(KEPT_STEP)), None)
    if isinstance(setting, int | float):
        return float(setting)
    if setting == AUTO:
        return AUTO_SHARE
    if run.values("bound/kl").empty:
        return math.nan
    return min(float(shares.median()), AUTO_SHARE) if len(shares) else AUTO_SHARE

"""How a run is set up, and the text of a setting that changes it: a job's override, or a field of GRPOConfig."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from rl_training.kl_share import AUTO, AUTO_SHARE, MAX_SHARE
from rl_training.records.jsonl import read_settings
from rl_training.records.made_by import JOB, TRL, VERL, made_by
from rl_training.records.report.series import Run

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL_NAMES = {  # by field of GRPOConfig
    "learning_rate": f"{ACTOR}.optim.lr", "weight_decay": f"{ACTOR}.optim.weight_decay",
    "max_grad_norm": f"{ACTOR}.grad_clip", "entropy_coef": f"{ACTOR}.entropy_coeff", "beta": f"{ACTOR}.kl_loss_coef",
    "max_completion_length": "data.max_response_length", "num_generations": f"{ROLLOUT}.n",
    "temperature": f"{ROLLOUT}.temperature", "top_p": f"{ROLLOUT}.top_p", "top_k": f"{ROLLOUT}.top_k",
}  # fmt: skip
PSR = "psr"  # the intervention that trains on positive advantages only
PSR_PAGE = "docs/how_to/keep_entropy_up.md"  # which has it as a subclass of TRL's trainer
KEPT_STEP = "target_kl_share"
SMALLER = 1 / 3  # times the share of a run whose bounded steps are too large


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

    @classmethod
    def of(cls, run: Run) -> SetUp:
        settings = run.settings or read_settings(run.folder)
        return cls(made_by(settings), settings, *_bound_of(run, settings))

    def trainer(self, name: str, default: Any = None) -> Any:
        """Return a field of GRPOConfig; `default` if it is None or not recorded."""
        fields = self.settings.get("trainer")
        value = fields.get(name) if isinstance(fields, dict) else self.settings.get(name)
        return default if value is None else value

    def number(self, name: str, default: float = math.nan) -> float:
        """Return a field of GRPOConfig that is a number; otherwise `default`."""
        value = self.trainer(name, default)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    def optimizer(self, name: str) -> float:
        """Return a setting of the optimizer, as loops record it; nan if it is not recorded."""
        fields = self.settings.get("optimizer")
        value = fields.get(name) if isinstance(fields, dict) else None
        return float(value) if isinstance(value, int | float) else math.nan

    @property
    def rate_name(self) -> str:
        names = {JOB: "trainer.learning_rate", VERL: VERL_NAMES["learning_rate"]}
        return names.get(self.kind, "the learning rate")

    @property
    def sequences(self) -> float:
        """Sequences per optimizer step, over all ranks; nan if not recorded."""
        batch = self.settings.get("batch")
        value = batch.get("sequences_per_step") if isinstance(batch, dict) else self.settings.get("sequences_per_step")
        return float(value) if isinstance(value, int | float) else math.nan

    @property
    def trained_parameters(self) -> int | None:
        """Number of trained parameters; None if not recorded."""
        model = self.settings.get("model")
        value = model.get("trained_parameters") if isinstance(model, dict) else self.settings.get("trained_parameters")
        return value if isinstance(value, int) else None

    @property
    def responses(self) -> float:
        """Responses per prompt; nan if not recorded."""
        return self.number("num_generations", self.number("responses_per_prompt"))

    @property
    def prompts(self) -> float:
        return self.sequences / self.responses if self.responses > 0 else math.nan

    def line(self, **fields: Any) -> str:
        """Return the text that sets these fields: `trainer.X=V`, `GRPOConfig(X=V)`, verl's name, or X=V in a loop."""
        texts = [f"{name}={_written(value)}" for name, value in fields.items()]
        if self.kind == JOB:
            return " ".join(f"trainer.{text}" for text in texts)
        if self.kind == VERL:
            return " ".join(f"{VERL_NAMES.get(name, name)}={_written(value)}" for name, value in fields.items())
        return f"GRPOConfig({', '.join(texts)})" if self.kind == TRL else ", ".join(texts)

    @property
    def of_generation(self) -> dict[str, Any]:
        """The settings in `generation_kwargs`, which only the sampler has."""
        settings = self.trainer("generation_kwargs")
        return dict(settings) if isinstance(settings, dict) else {}

    def sample_with(self, **fields: Any) -> str:
        """Return the text that makes the sampler use these fields: in `generation_kwargs` where they are set there."""
        apart = {name: value for name, value in fields.items() if name in self.of_generation}
        shared = {name: value for name, value in fields.items() if name not in apart}
        if apart and self.kind == JOB:
            inside = [f"trainer.generation_kwargs.{name}={_written(value)}" for name, value in apart.items()]
            return " ".join([self.line(**shared)] * bool(shared) + inside)
        if apart:
            shared["generation_kwargs"] = self.of_generation | apart
        return self.line(**shared)

    def larger_batch(self, times: int) -> str:
        """Return the text of a setting that multiplies the prompts of a step by `times`."""
        if self.kind == JOB and math.isfinite(self.sequences):
            return f"batch.sequences_per_step={times * self.sequences:.0f}"
        accumulated = self.number("gradient_accumulation_steps")
        if self.kind == TRL and math.isfinite(accumulated):
            return self.line(gradient_accumulation_steps=times * int(accumulated))
        return f"{times} times as many prompts in a step"

    @property
    def is_bounded(self) -> bool:
        return not math.isnan(self.share)

    def bounded_step(self, times: float = SMALLER) -> str:
        """Return the text of a setting that bounds how far a step moves the policy.

        Args:
            times: Factor on the share of a run that has the bound already.
        """
        if self.kind == VERL:  # which has no bounded step
            rate = self.optimizer("lr")
            return self.line(learning_rate=0.3 * rate if math.isfinite(rate) else "…")
        if self.aimed_at > MAX_SHARE and times < 1:  # no share can be set as high
            return (
                f"a schedule that never exceeds its first rate (this one made of {KEPT_STEP} targets of up to "
                f"{self.aimed_at:.2g} times the entropy)"
            )
        share = f"{min(times * self.share, MAX_SHARE):.2g}" if self.is_bounded else AUTO
        if self.kind == JOB:
            return f"trainer.{KEPT_STEP}={share}"
        whose = "DrGRPOConfig" if "DrGRPO" in str(self.trainer("class", "")) else "attach"
        whose = whose if self.kind == TRL else "measured_loop"
        others = "" if whose == "DrGRPOConfig" else "…, "
        return f"{whose}({others}{KEPT_STEP}={share if self.is_bounded else json.dumps(share)})"

    def smaller_steps(self) -> str:
        """Return the text of the settings that make steps smaller; under the bound, the rate is not one of them."""
        return self.bounded_step() + ", or a lower learning rate" * (not self.is_bounded)

    def larger_steps(self) -> str:
        """Return the text of the settings that make steps larger."""
        if self.is_bounded:
            return self.bounded_step(times=1 / SMALLER)
        rate = self.number("learning_rate", self.optimizer("lr"))
        return self.line(learning_rate=rate / SMALLER) if math.isfinite(rate) else "a higher learning rate"

    def reward_weights(self) -> str:
        """Return the text of the setting that weighs several reward functions."""
        return self.line(reward_weights="[…]") if self.kind in (JOB, TRL) else "the weights of your rewards"

    @property
    def interventions(self) -> list[str]:
        """The interventions that the run trains with, by name."""
        named = self.settings.get("intervention") or self.trainer("interventions") or self.settings.get("interventions")
        names = named if isinstance(named, list) else [named]
        written = [PSR] if "PositiveOnly" in str(self.trainer("class", "")) else []
        return written + [str(name) for name in names if name]

    def positive_only(self) -> str:
        """Return the text of the setting that trains on positive advantages only."""
        if self.kind == JOB:
            return f"intervention={PSR}"
        if self.kind == TRL and "DrGRPO" in str(self.trainer("class", "")):
            return f'DrGRPOTrainer(…, interventions=["{PSR}"])'
        return f"PositiveOnly(GRPOTrainer) of {PSR_PAGE}" if self.kind == TRL else "clamp advantages to at least 0"

    def probes(self, *names: str) -> str:
        """Return the text of a setting that adds probes."""
        names = ("simple", *(name for name in names if name != "simple"))
        return f"probe=[{','.join(names)}]" if self.kind == JOB else f"probes={json.dumps(names)}"


def _bound_of(run: Run, settings: dict[str, Any]) -> tuple[float, float]:
    """Return `share` and `aimed_at` of SetUp; a share that is not recorded is read off the targets."""
    targets, entropy = run.values("bound/target_kl").align(run.token_entropy(), join="inner")
    aimed = (targets / entropy)[entropy > 0]
    places = (settings.get("attached"), settings.get("trainer"), settings)
    recorded = next((place[KEPT_STEP] for place in places if isinstance(place, dict) and place.get(KEPT_STEP)), None)
    share = AUTO_SHARE if recorded == AUTO else math.nan
    if isinstance(recorded, int | float):
        share = float(recorded)
    elif math.isnan(share) and len(run.values("bound/kl")):
        share = min(float(aimed.median()), AUTO_SHARE) if len(aimed) else AUTO_SHARE
    return share, float(aimed.max()) if len(aimed) else math.nan


def _written(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)

"""Settings to change, as overrides of verl's configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from rl_training.records.report.proposals import Change
from rl_training.records.report.wording.base import OPEN, PROBES, SMALLER, Wording, change_of, probe_override, rounded
from rl_training.records.report.wording.trl import INTERVENTION_FIELDS

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
VERL_NAMES = {  # by field of GRPOConfig
    "learning_rate": f"{ACTOR}.optim.lr", "weight_decay": f"{ACTOR}.optim.weight_decay",
    "max_grad_norm": f"{ACTOR}.grad_clip", "entropy_coef": f"{ACTOR}.entropy_coeff", "beta": f"{ACTOR}.kl_loss_coef",
    "epsilon_high": f"{ACTOR}.clip_ratio_high",
    "max_completion_length": "data.max_response_length", "num_generations": f"{ROLLOUT}.n",
    "temperature": f"{ROLLOUT}.temperature", "top_p": f"{ROLLOUT}.top_p", "top_k": f"{ROLLOUT}.top_k",
}  # fmt: skip
VERL_KL = f"{ACTOR}.use_kl_loss=True"  # without it the coefficient has no effect


class VerlWording(Wording):
    """For verl: overrides of its configuration, which has no bounded step and no interventions."""

    responses_name = "num_generations"

    @property
    def rate_name(self) -> str:
        return VERL_NAMES["learning_rate"]

    def fields(self, **fields: Any) -> Change:
        texts = [f"{VERL_NAMES.get(name, name)}={value}" for name, value in fields.items()]
        known = [text for text, name in zip(texts, fields, strict=True) if name in VERL_NAMES]
        return replace(change_of(fields, known), text=" ".join(texts))

    def bounded_step(self, times: float = SMALLER) -> Change:
        rate = self.set_up.rate
        return self.fields(learning_rate=rounded(times * rate) if math.isfinite(rate) else OPEN)

    def smaller_steps(self) -> Change:
        return self.bounded_step()  # it is a lower rate already

    def _trainers_own(self, name: str, strength: str) -> Change | None:
        field, value = INTERVENTION_FIELDS.get(name, ("", None))
        if VERL_NAMES.get(field) is None or value is not None or not strength:
            return None
        setting = f"{VERL_NAMES[field]}={strength}"
        return change_of([field], [VERL_KL, setting] if name == "kl" else [setting])

    def probes(self, *names: str) -> Change:
        return change_of([PROBES], [probe_override(names)])

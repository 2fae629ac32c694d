"""The options of an attachment, for `attach` and for DrGRPOTrainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import TrainerCallback

from rl_training.engine.kl_bound import share_of_entropy
from rl_training.hosts.trl.settings.spelling import PYTHON, Spelling
from rl_training.interventions.named import Intervention


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `attach`, which documents them, and of DrGRPOTrainer."""

    whole_prompts: bool | None = None
    metrics: Literal["core", "all"] = "core"
    target_kl_share: float | str | None = None
    interventions: Sequence[Intervention] = ()  # that the trainer trains with, applied in this order
    keep_attached: bool = False  # whether the probes stay attached after a training has ended
    strict: bool | None = None
    callback: TrainerCallback | None = None  # added to the trainer and removed with the probes
    spelling: Spelling = PYTHON  # names settings in advice

    @property
    def changes_of_loss(self) -> list[Intervention]:
        """The interventions that change the loss. Others change the optimizer's settings alone."""
        return [intervention for intervention in self.interventions if intervention.function is not None]

    @property
    def training_needs_measurements(self) -> bool:
        """Whether training depends on what is measured, so that it cannot go on without."""
        return bool(self.changes_of_loss) or self.target_kl_share is not None

    @property
    def recorded(self) -> dict[str, Any]:
        """The settings that affect training, for its records."""
        return {
            "whole_prompts": self.whole_prompts,
            "interventions": [intervention.name for intervention in self.changes_of_loss],
            "target_kl_share": share_of_entropy(self.target_kl_share),
        }

    @property
    def longer_responses(self) -> str:
        """Advice: what lets responses get longer."""
        return f"raise {self.spelling.name('max_completion_length')}"

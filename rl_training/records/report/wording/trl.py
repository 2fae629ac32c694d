"""Settings to change, as arguments of TRL's classes and of `attach`."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rl_training.records.report.proposals import Change
from rl_training.records.report.set_up import KEPT_STEP, PSR
from rl_training.records.report.wording.base import (
    LOSS,
    OPEN,
    Wording,
    argument_of,
    branch_folder,
    change_of,
    in_python,
)
from rl_training.records.table.effects import Effect
from rl_training.records.table.series import Run

PSR_PAGE = "docs/how_to/keep_entropy_up.md"  # which has it as a subclass of TRL's trainer
# By intervention: the field of GRPOConfig that does the same, and its value; None for the intervention's strength.
INTERVENTION_FIELDS: Mapping[str, tuple[str, Any]] = {
    "bonus": ("entropy_coef", None), "max_grad_norm": ("max_grad_norm", None),
    "top_entropy": ("top_entropy_quantile", None), "kl": ("beta", None), "clip_higher": ("epsilon_high", None),
    "std_norm": ("scale_rewards", "group"), "length_norm": ("loss_type", "grpo"),
    "drop_truncated": ("mask_truncated_completions", True), "keep_truncated": ("mask_truncated_completions", False),
}  # fmt: skip


class TrlWording(Wording):
    """For a TRL trainer with attached probes: arguments of GRPOConfig and `attach`."""

    responses_name = "num_generations"
    config_name = "GRPOConfig"

    def fields(self, **fields: Any) -> Change:
        texts = [f"{name}={in_python(value)}" for name, value in fields.items()]
        return change_of(fields, [f"{self.config_name}({', '.join(texts)})"])

    def larger_batch(self, times: int) -> Change:
        accumulated = self.set_up.number("gradient_accumulation_steps")
        if not math.isfinite(accumulated):
            return super().larger_batch(times)
        return self.fields(gradient_accumulation_steps=times * int(accumulated))

    def _bounded_to(self, share: float | str) -> Change:
        return argument_of(KEPT_STEP, "attach", f"{KEPT_STEP}={in_python(share)}")

    def reward_weights(self) -> Change:
        return self.fields(reward_weights=f"[{OPEN}]")

    def positive_only(self) -> Change:
        return Change(f"PositiveOnly(GRPOTrainer) of {PSR_PAGE}", target=LOSS)

    def branches(self, run: Run, preferred: Sequence[tuple[str, Effect]]) -> list[str]:
        """Return lines of Python that continue from a checkpoint: unchanged, with PSR, and with the first of these."""
        (name, effect) = preferred[0]
        folder = self.set_up.trainer("output_dir", "OUTPUT_DIR")
        resume = f'trainer.train(resume_from_checkpoint="{folder}/checkpoint-N")'
        saved = "that it has saved"
        if self.set_up.trainer("save_strategy") == "no":
            saved = "(this run has saved none: train it again with save_strategy='steps' and save_steps)"
        tries = {str(branch_folder(run, "plain")): "without a change"}
        if not self.set_up.has_sign_intervention:
            tries[str(branch_folder(run, PSR))] = f"with {self.positive_only().text}"
        if effect.bare_name != PSR:
            tries[str(branch_folder(run, name))] = f"with {self._on_resuming(name, effect)}"
        lines = [f"# Each with a trainer made anew, from a checkpoint {saved}; max_steps above {run.steps[-1]}."]
        for folder, how in tries.items():
            lines += self._recorded_in(folder, how, resume)
        return [*lines, "# Then, in a shell:", shlex.join(["rl-training", "report", *tries])]

    def _on_resuming(self, name: str, effect: Effect) -> str:
        """Return what trains with an intervention from a checkpoint on, given its name as configured."""
        if effect.bare_name == "lr":  # a resumed trainer has the checkpoint's rate, whatever GRPOConfig says
            factor = name.partition(":")[2]
            return f"ScaleLearningRate({factor}) of {PSR_PAGE} among its callbacks, because resuming keeps the rate"
        return self.intervention(effect).text

    def _recorded_in(self, folder: str, how: str, training: str) -> list[str]:
        """Return the lines of Python that train with records in a folder.

        Args:
            folder: The folder.
            how: How the trainer is made, in words.
            training: The call that trains.
        """
        return [f"# One {how}:", f'with attach(trainer, "{folder}"):', f"    {training}"]

    def _trainers_own(self, name: str, strength: str) -> Change | None:
        field, value = INTERVENTION_FIELDS.get(name, ("", None))
        if not field or (value is None and not strength):
            return None
        return change_of([field], [f"{self.config_name}({field}={strength if value is None else in_python(value)})"])


class DrGrpoWording(TrlWording):
    """For a DrGRPOTrainer of one's own script, which has the bound and interventions itself."""

    config_name = "DrGRPOConfig"

    def _bounded_to(self, share: float | str) -> Change:
        return self.fields(**{KEPT_STEP: share})

    def positive_only(self) -> Change:
        return self._train_with(PSR)

    def intervention(self, effect: Effect) -> Change:
        return self._train_with(self.set_up.name_as_configured(effect))

    def _on_resuming(self, name: str, effect: Effect) -> str:
        return self.intervention(effect).text

    def _recorded_in(self, folder: str, how: str, training: str) -> list[str]:
        return [f'# One {how}, made with records="{folder}/logs":', training]

    def _train_with(self, name: str) -> Change:
        names = self.set_up.interventions_with(name)
        return argument_of(LOSS, "DrGRPOTrainer", f"interventions={json.dumps(names)}")

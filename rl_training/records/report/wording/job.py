"""Settings to change, as Hydra's overrides of `rl-training train`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_training.records.folder import checkpoints_of
from rl_training.records.hydra_text import quote_list, quote_override, quote_value
from rl_training.records.report.proposals import Change
from rl_training.records.report.set_up import KEPT_STEP, PSR
from rl_training.records.report.wording.base import (
    BATCH,
    LOSS,
    MAX_PROPOSALS,
    OPEN,
    PROBES,
    Wording,
    branch_folder,
    change_of,
    probe_override,
)
from rl_training.records.table.effects import Effect
from rl_training.records.table.series import Run

BRANCH_STEPS = 40  # steps of each branch


class JobWording(Wording):
    """For `rl-training train`: Hydra's overrides."""

    @property
    def rate_name(self) -> str:
        return "trainer.learning_rate"

    def fields(self, **fields: Any) -> Change:
        return change_of(fields, [f"trainer.{name}={value}" for name, value in fields.items()])

    def _sample_with(self, shared: dict[str, Any], apart: dict[str, Any]) -> Change:
        return self.fields(**shared, **{f"generation_kwargs.{name}": value for name, value in apart.items()})

    def larger_batch(self, times: int) -> Change:
        if not math.isfinite(self.set_up.sequences):
            return super().larger_batch(times)
        return change_of([BATCH], [f"batch.sequences_per_step={times * self.set_up.sequences:.0f}"])

    def _bounded_to(self, share: float | str) -> Change:
        return self.fields(**{KEPT_STEP: share})

    def more_unequal_rewards(self) -> Change:
        return change_of(["buffer"], ["buffer=filtered"])

    def reward_weights(self) -> Change:
        return self.fields(reward_weights=f"[{OPEN}]")

    def positive_only(self) -> Change:
        return self._train_with(PSR)

    def intervention(self, effect: Effect) -> Change:
        return self._train_with(self.set_up.name_as_configured(effect))

    def _train_with(self, name: str) -> Change:
        names = self.set_up.interventions_with(name)
        value = quote_value(name) if names == [name] else quote_list(names)
        return change_of([LOSS], [shlex.quote(f"intervention={value}")])

    def probes(self, *names: str) -> Change:
        return change_of([PROBES], [probe_override(names)])

    def branches(self, run: Run, preferred: Sequence[tuple[str, Effect]]) -> list[str]:
        """Return the commands; none if there is no checkpoint to branch from."""
        checkpoints = checkpoints_of(run.folder)
        names = [name for name, _ in preferred]
        if not self.set_up.has_sign_intervention:
            names = [PSR, *names]
        names = [name for name in dict.fromkeys(names) if name not in self.set_up.interventions][:MAX_PROPOSALS]
        if not checkpoints or not names:
            return []
        branches = {branch_folder(run, "plain"): ""}
        for name in names:
            branches[branch_folder(run, name)] = f"intervention={quote_list(self.set_up.interventions_with(name))}"
        branch = f"branch={quote_value(str(checkpoints[-1]))}"
        start = ["rl-training", "train", branch, f"additional_steps={BRANCH_STEPS}"]
        trainings = [
            [*start, f"run_dir={quote_value(str(folder))}", *([setting] if setting else [])]
            for folder, setting in branches.items()
        ]
        return [shlex.join(words) for words in [*trainings, ["rl-training", "report", *map(str, branches)]]]

    def branch_from(self, checkpoint: Path) -> str:
        return quote_override("branch", str(checkpoint))

"""A progress bar over optimizer steps, with the numbers one watches: reward, entropy, predicted change of entropy."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

SHOWN = {"reward": "reward", "entropy": "entropy", "delta_h/forward": "δH"}


class StepProgress(TrainerCallback):
    """One line that is redrawn at each step, on the main process."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar = tqdm(
            total=state.max_steps, initial=state.global_step, unit="step", disable=not state.is_world_process_zero
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        shown = {label: f"{logs[key]:+.4f}" if key == "delta_h/forward" else f"{logs[key]:.3f}"
                 for key, label in SHOWN.items() if logs.get(key) is not None}  # fmt: skip
        if shown:
            self._bar.set_postfix(shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.close()

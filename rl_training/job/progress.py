"""A progress bar over optimizer steps, with the numbers one watches: reward, entropy, predicted change of entropy."""

from __future__ import annotations

import contextlib
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import TrainerCallback

SHOWN = {"reward": "reward", "entropy": "entropy", "delta_h/forward": "δH"}
PROBED = {"entropy": "entropy/token"}  # measured over all tokens, as in the report: shown instead, where a probe has it
# Without tqdm's rate, and with a bar of fixed width, all numbers fit into 80 columns.
FORMAT = "{percentage:3.0f}%|{bar:8}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class StepProgress(TrainerCallback):
    """One line that is redrawn at each step, on the main process."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluation: tqdm[Any] | None = None  # its own bar, while it lasts
        self._lines = contextlib.ExitStack()
        self._lines.enter_context(logging_redirect_tqdm())  # else what is logged stands behind the bar
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            unit="step",
            bar_format=FORMAT,
            disable=not state.is_world_process_zero,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.update(state.global_step - self._bar.n)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._evaluation is None:
            self._evaluation = tqdm(
                total=len(kwargs["eval_dataloader"]), desc="evaluation", unit="batch", leave=False,
                disable=not state.is_world_process_zero,
            )  # fmt: skip
        self._evaluation.update()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._evaluation is not None:
            self._evaluation.close()
        self._evaluation = None

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        logs = {**logs, **{key: logs[probed] for key, probed in PROBED.items() if logs.get(probed) is not None}}
        shown = {label: f"{logs[key]:+.4f}" if key == "delta_h/forward" else f"{logs[key]:.3f}"
                 for key, label in SHOWN.items() if logs.get(key) is not None}  # fmt: skip
        if shown:
            self._bar.set_postfix(shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.close()
        self._lines.close()

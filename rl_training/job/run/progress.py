"""The progress bar of a training, with reward, entropy and the predicted change of entropy."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import ProgressCallback

from rl_training.statistics.estimate import Z_95

# By label: metrics in order of preference, and the number format. If a probe measures it, entropy is the mean over all
# tokens, as in the report.
SHOWN = {
    "reward": (("reward",), ".3f"),
    "entropy": (("entropy/token", "entropy"), ".3f"),
    "δH": (("delta_h/forward", "measured/delta_h"), "+.4f"),
}
# Without tqdm's rate and with a bar of fixed width, all numbers fit into 80 columns.
FORMAT = "{percentage:3.0f}%|{bar:3}| {n_fmt}/{total_fmt}{desc} [{elapsed}<{remaining}{postfix}]"
SECONDS_OF_SILENCE = 10.0  # after which an unfinished step shows its progress
SAMPLING = "sampling"  # shown instead of the numbers until the first responses are complete


class StepProgress(ProgressCallback):
    """transformers' progress bar with these numbers: one line, redrawn at each step, on the main process.

    During a slow step it is also redrawn after microbatches and counts them: "1/16 +3/8".
    """

    training_bar: Any  # a tqdm bar, or None
    prediction_bar: Any  # likewise, of an evaluation

    def __init__(self) -> None:
        super().__init__()
        self._lines = contextlib.ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._lines.enter_context(logging_redirect_tqdm())  # otherwise log lines would be appended to the bar
        self.current_step = state.global_step
        if self.training_bar is not None:
            self.training_bar.bar_format = FORMAT
            self.training_bar.initial = self.training_bar.n = state.global_step
            self.training_bar.set_postfix_str(SAMPLING)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._microbatches = 0
        self._drawn_at = time.monotonic()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._microbatches += 1
        if self.training_bar is not None and time.monotonic() - self._drawn_at > SECONDS_OF_SILENCE:
            self._drawn_at = time.monotonic()
            self._show_substep(f" +{self._microbatches}/{args.gradient_accumulation_steps}")
            self.training_bar.refresh()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self._show_substep("")
        super().on_step_end(args, state, control, **kwargs)

    def _show_substep(self, place: str) -> None:
        """Put the progress within the step into the bar without redrawing it, and remove the text "sampling"."""
        self.training_bar.set_description_str(place, refresh=False)
        if self.training_bar.postfix == SAMPLING:
            self.training_bar.set_postfix_str("", refresh=False)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        shown = {}
        for label, (keys, form) in SHOWN.items():
            key = next((key for key in keys if logs.get(key) is not None), None)
            if key is not None:
                stderr = logs.get(f"{key}_se")  # without degrees of freedom: a normal interval
                bar = "" if stderr is None else f"±{Z_95 * stderr:{form.lstrip('+')}}"
                shown[label] = f"{logs[key]:{form}}{bar}"
        if shown and self.training_bar is not None:
            self.training_bar.set_postfix(shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the bar's line, also after an error, whose line would otherwise be appended to it."""
        for bar in filter(None, (self.prediction_bar, self.training_bar)):
            bar.close()
        self.prediction_bar = self.training_bar = None
        self._lines.close()

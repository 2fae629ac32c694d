"""A progress bar over optimizer steps, with the numbers one watches: reward, entropy, predicted change of entropy."""

from __future__ import annotations

import contextlib
from typing import Any

from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import ProgressCallback

# By label, the metrics that it can be and how it is written. Entropy over all tokens, as in the report, where a probe
# measures it.
SHOWN = {
    "reward": (("reward",), ".3f"),
    "entropy": (("entropy/token", "entropy"), ".3f"),
    "δH": (("delta_h/forward",), "+.4f"),
}
# Without tqdm's rate, and with a bar of fixed width, all numbers fit into 80 columns.
FORMAT = "{percentage:3.0f}%|{bar:8}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class StepProgress(ProgressCallback):
    """transformers' bar with these numbers in it: one line that is redrawn at each step, on the main process."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._lines = contextlib.ExitStack()
        self._lines.enter_context(logging_redirect_tqdm())  # else what is logged stands behind the bar
        self.current_step = state.global_step
        if self.training_bar is not None:
            self.training_bar.bar_format = FORMAT
            self.training_bar.initial = self.training_bar.n = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        found = {label: next((logs[key] for key in keys if logs.get(key) is not None), None)
                 for label, (keys, _) in SHOWN.items()}  # fmt: skip
        shown = {label: format(value, SHOWN[label][1]) for label, value in found.items() if value is not None}
        if shown and self.training_bar is not None:
            self.training_bar.set_postfix(shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        self._lines.close()

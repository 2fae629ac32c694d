"""An alert during training: token entropy will probably be below a level soon."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from rl_training.mathematics.forecast import FEWEST, Ahead, EntropyForecast

logger = logging.get_logger(__name__)

TITLE = "entropy is about to be low"
AHEAD = 20  # steps; a fixed level can be forecast this far ahead, a halving of the present entropy cannot
FIRES, ENDS = 0.5, 0.8  # at these probabilities
FIRST_MISSES = 9  # before ten steps are measured the ranges are too narrow
WINDOW = 5  # measured steps whose mean says whether entropy is below the level: one batch alone is too noisy
BENCHMARK = (
    "57 to 89 % were right in the benchmark (levels of .05 and .1 nats, 105k parameters, 100 steps, its constants)"
)


class EntropyAlert(TrainerCallback):
    """Alerts when forecast.py gives token entropy a chance of one half or more to be below a level in 20 steps.

    trainer = trl.GRPOTrainer(..., callbacks=[EntropyAlert(below=0.05)])

    It reads what the trainer logs: `entropy/token` and `delta_h/forward` of the SimpleEntropyProbe with their errors,
    or where these are missing TRL's own `entropy` and `measured/delta_h` of the MeasuredStepProbe. It adds `forecast/…`
    to the log, which later callbacks see. All of its state follows from the trainer's log, so a resumed run continues
    as if never interrupted. Use logging_steps=1: a mean over several steps would be treated as the last step's value.

    below   the level, in nats per token
    tell    called with a title and a text on the main process, beside the line in the log
    stop    called at a chance of .8 or more, on every process; `None`: training continues
    """

    def __init__(
        self, below: float, tell: Callable[[str, str], None] | None = None, stop: Callable[[], None] | None = None
    ) -> None:
        self.below = below
        self.tell = tell
        self.stop = stop
        self._begin()

    def _begin(self) -> None:
        self._forecast = EntropyForecast()
        self._probed = False  # then TRL's number, which is averaged otherwise, no longer counts
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._quiet_until = 0
        self._news = True  # that it is below: it has been above since it was said, or since it came true
        self._due = 0  # the step by which the last alert has to come true; 0: none is open
        self.alerts = self.checked = self.right = 0  # in this run; checked: come true, or their 20 steps have passed

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin()
        for row in state.log_history:  # of the checkpoint that training goes on from
            self._take(row["step"], row)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        alerts = self.alerts
        ahead = self._take(state.global_step, logs)
        if ahead is None:
            return
        low, high = ahead.range
        chance = ahead.chance_below(self.below)
        logs |= {"forecast/median": ahead.median, "forecast/low": low, "forecast/high": high,
                 "forecast/chance_below": chance, "forecast/alerts": self.alerts,
                 "forecast/alerts_checked": self.checked, "forecast/alerts_right": self.right}  # fmt: skip
        ends = self.stop is not None and chance >= ENDS and self._forecast.misses >= FIRST_MISSES
        if self.alerts > alerts or ends:
            self._speak(state, ahead, ends)
        if ends and self.stop is not None:
            self.stop()

    def _take(self, step: int, logs: Mapping[str, Any]) -> Ahead | None:
        """Returns the forecast after a step's log, None where the log has no entropy; counts alerts."""
        self._probed = self._probed or "entropy/token" in logs
        entropy = logs.get("entropy/token" if self._probed else "entropy")
        if entropy is None:
            return None
        # Where there is no prediction of this step: what the steps before it did.
        name = "delta_h/forward" if "delta_h/forward" in logs else "measured/delta_h"
        steps = logs.get("measured/steps", 1.0) if name == "measured/delta_h" else 1.0
        change = (logs[end] / steps if end in logs else math.nan for end in (name, f"{name}_se"))
        self._forecast.see(step, entropy, logs.get("entropy/token_se", math.nan), *change)
        if self._forecast.step != step:
            return None
        self._last.append(entropy)
        is_below = statistics.fmean(self._last) < self.below
        if self._due and (is_below or step >= self._due):  # the last alert has come true, or its time has run out
            came_true = is_below and step <= self._due
            self.right += came_true
            self.checked += 1
            self._due = 0
            self._news = self._news and not came_true
        ahead = self._forecast.ahead(AHEAD)
        likely = ahead.chance_below(self.below) >= FIRES and self._forecast.misses >= FIRST_MISSES
        self._news = self._news or not is_below
        if likely and step >= self._quiet_until and self._news:
            self.alerts += 1
            self._news = False
            self._quiet_until = step + AHEAD
            self._due = 0 if is_below else step + AHEAD  # entropy is below already: nothing was forecast
        return ahead

    def _speak(self, state: Any, ahead: Ahead, ends: bool) -> None:
        low, high = ahead.range
        text = (
            f"step {state.global_step}: token entropy is {statistics.fmean(self._last):.3g} nats (mean of the last "
            f"{len(self._last)} measured) and has a {ahead.chance_below(self.below):.0%} chance to be below "
            f"{self.below:g} in {AHEAD} steps: median {ahead.median:.3g}, 95 % range {low:.2g} to {high:.2g}. Of "
            f"earlier alerts {self.right} of {self.checked} were right in this run; {BENCHMARK}"
        )
        if self._forecast.misses < FEWEST:
            text += f". The forecast does not know this run's noise yet: {self._forecast.misses} of {FEWEST} steps"
        if ends:
            text += ". alert.stop ends the run"
        if state.is_world_process_zero:
            logger.warning(f"{TITLE}: {text}")
            if self.tell is not None:
                self.tell(TITLE, text)

"""An alert while a run trains: a straight line through the last steps ends below a level soon. No forecast."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from rl_training.hosts.trl.attach import Attachment
from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.present_rate import down_to, half_of, is_below_within, present_rate, steps_left

logger = logging.get_logger(__name__)

TITLE = "entropy is falling"
MEASURED_STEPS = 10  # over which the present rate is taken; with fewer there is no alert


class EntropyAlert(TrainerCallback):
    """Says so when token entropy, going on at its present rate, would be below a level within so many steps.

    That is a straight line, and the curve of entropy mostly flattens: the line is below it, and early. On two plain
    runs of the default task it was so at 36 of 52 steps, and at none of the 20 that could be checked did it come true.
    What it waits for is the noise of the rate only.

    trainer.add_callback(EntropyAlert(trainer.attachment, within_steps=100))

    attachment    the probes' own; one of them is a SimpleEntropyProbe
    within_steps  so far it looks ahead; after an alert, as many steps pass until the next
    below         the level, in nats per token; None: half of what is left
    tell          called with a title and a text on the main process, beside the line in the log
    stop          called on every process, at the same step; `None`: training goes on. It would end runs that go well
    """

    def __init__(
        self,
        attachment: Attachment,
        within_steps: int,
        below: float | None = None,
        tell: Callable[[str, str], None] | None = None,
        stop: Callable[[], None] | None = None,
    ) -> None:
        if not any(probe.name == "simple" for probe in attachment.probes):
            raise ValueError("the alert needs delta_h/forward: add the SimpleEntropyProbe, probe=simple")
        self.within_steps = within_steps
        self.below = below
        self.tell = tell
        self.stop = stop
        self._attachment = attachment
        self._changes: deque[Estimate] = deque(maxlen=MEASURED_STEPS)
        self._quiet_until = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        answers = self._attachment.latest
        forward, entropy = answers.get("delta_h/forward"), answers.get("entropy/token")
        if forward is None or entropy is None or forward.about_step != state.global_step:
            return  # not measured at this step
        self._changes.append(forward)
        if len(self._changes) < MEASURED_STEPS or state.global_step < self._quiet_until:
            return
        rate = present_rate(self._changes)
        distance = half_of(entropy) if self.below is None else down_to(self.below, entropy)
        if is_below_within(self.within_steps, distance, rate):
            self._quiet_until = state.global_step + self.within_steps
            self._alert(state, entropy, rate, steps_left(distance, rate))

    def _alert(self, state: Any, entropy: Estimate, rate: Estimate, left: float) -> None:
        what = "half of it is gone" if self.below is None else f"it is below {self.below:g}"
        text = (
            f"step {state.global_step}: token entropy is {entropy.value:.3g} nats and changes by {rate.value:+.2g} ± "
            f"{rate.half_width():.1g} a step: in a straight line {what} in {left:.0f} steps. No forecast: entropy "
            f"mostly flattens{'; alert.stop ends the run by this line' if self.stop else ''}"
        )
        if state.is_world_process_zero:
            logger.warning(f"{TITLE}: {text}")
            if self.tell is not None:
                self.tell(TITLE, text)
        if self.stop is not None:
            self.stop()

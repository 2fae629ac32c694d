"""Sends what stands out in a run while it trains, as W&B's and trackio's alerts, with the sentences of the report."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.utils import logging

from rl_training.errors import UserError, require_extra
from rl_training.hosts.trl.output.attached_run import AttachedRun
from rl_training.parallel.ranks import all_ranks

if TYPE_CHECKING:
    from rl_training.records.report.standing_out.finding import Finding

logger = logging.get_logger(__name__)

Send = Callable[[str, str], object]
FIRST = 10  # steps before the records are first read, and the fewest between two readings
SHARE = 0.1  # share of the steps so far between two readings, so that their total cost grows like the run


class Alerts(TrainerCallback):
    """Reads the records of a run as it trains, on the main process, and sends each finding once.

    Args:
        run: The run.

    Raises:
        UserError: If the run is not written to a folder, or the extra `report` is not installed.
    """

    def __init__(self, run: object) -> None:
        if not isinstance(run, AttachedRun):
            raise UserError("alerts=True reads the records of a run: attach(trainer, FOLDER, alerts=True)")
        with require_extra():
            from rl_training.records.report.standing_out import shown, standing_out
            from rl_training.records.table.reading import read_run
        self._find: Callable[[], list[Finding]] = lambda: shown(standing_out(read_run(run.folder)))
        self._sent: set[tuple[str, str]] = set()  # names of a finding and of the tracker that has it
        self._next = FIRST

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin anew: each training in a `with` block has records of its own."""
        self._sent.clear()
        self._next = FIRST

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look for what stands out in the steps that have been written, from time to time."""
        if all_ranks().number != 0 or state.global_step < self._next:
            return
        self._next = state.global_step + max(FIRST, int(SHARE * state.global_step))
        with _logged_errors():
            findings = self._find()
            for finding, (tracker, send) in itertools.product(findings, senders().items()):
                if (finding.name, tracker) not in self._sent:
                    with _logged_errors():
                        send(f"{state.global_step} steps: {finding.name.replace('_', ' ')}", finding.text)
                        self._sent.add((finding.name, tracker))  # one that fails is sent again the next time


@contextlib.contextmanager
def _logged_errors() -> Iterator[None]:
    """Log an error instead of raising it, so that training continues."""
    try:
        yield
    except Exception as error:
        logger.warning_once(f"alerts could not be made ({type(error).__name__}: {error}); the report has them")


def senders() -> dict[str, Send]:
    """Return the functions that send an alert, by tracker: W&B and trackio if they have a run here, else the log."""
    wandb = sys.modules.get("wandb")
    trackio = sys.modules.get("trackio")
    by_tracker: dict[str, Send] = {}
    if wandb is not None and wandb.run is not None:
        by_tracker["wandb"] = wandb.run.alert
    if trackio is not None and trackio.context_vars.current_run.get() is not None:
        by_tracker["trackio"] = trackio.alert
    return by_tracker or {"log": lambda title, text: logger.warning(text)}

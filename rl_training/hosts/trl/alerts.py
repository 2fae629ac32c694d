"""Sends what stands out in a run while it trains, as W&B's and trackio's alerts, with the sentences of the report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.utils import logging

from rl_training.errors import UserError
from rl_training.extras import require_extra
from rl_training.hosts.trl.attached_run import AttachedRun
from rl_training.parallel.ranks import all_ranks

if TYPE_CHECKING:
    from rl_training.records.report.standing_out.line import Line

logger = logging.get_logger(__name__)

Send = Callable[[str, str], object]
FIRST = 10  # steps before the records are read for the first time, and at least between two times
SHARE = 0.1  # of the steps so far, between two times: all reading together stays proportional to the run


class Alerts(TrainerCallback):
    """Reads the records of a run as it trains, on the main process, and sends each line that stands out once.

    Args:
        run: The run.

    Raises:
        UserError: If the run is not written to a folder, or the extra `report` is not installed.
    """

    def __init__(self, run: AttachedRun | object) -> None:
        if not isinstance(run, AttachedRun):
            raise UserError("alerts=True reads the records of a run: attach(trainer, FOLDER, alerts=True)")
        with require_extra():
            from rl_training.records.report.series import read_run
            from rl_training.records.report.standing_out import standing_out
        self._find: Callable[[], list[Line]] = lambda: standing_out(read_run(run.folder))
        self._sent: set[str] = set()
        self._next = FIRST

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look for what stands out in the steps that have been written, from time to time."""
        if all_ranks().number != 0 or state.global_step < self._next:
            return
        self._next = state.global_step + max(FIRST, int(SHARE * state.global_step))
        try:
            for line in self._find():
                if line.name not in self._sent:
                    self._sent.add(line.name)
                    send(f"{state.global_step} steps: {line.name.replace('_', ' ')}", line.text)
        except Exception as error:  # training goes on
            logger.warning_once(f"alerts could not be made ({type(error).__name__}: {error}); the report has them")


def send(title: str, text: str) -> None:
    """Send an alert to each tracker that has a run in this process, or print it if none has."""
    senders = _senders()
    for sender in senders:
        sender(title, text)
    if not senders:
        logger.warning(text)


def _senders() -> list[Send]:
    """Return the functions that alert, of the trackers that the script has imported and that have a run."""
    wandb, trackio = sys.modules.get("wandb"), sys.modules.get("trackio")
    senders: list[Send] = []
    if wandb is not None and wandb.run is not None:
        senders.append(wandb.run.alert)
    if trackio is not None and trackio.context_vars.current_run.get() is not None:
        senders.append(trackio.alert)
    return senders

"""Ends a training at the end of the step in which a signal arrives.

SIGINT (Ctrl-C), SIGTERM (from `kill`, or from Slurm before it preempts) and a launcher that has died request the end:
training finishes the step and writes a checkpoint from which it resumes exactly. A request to one of several processes
suffices: they agree at the end of each step. A second signal ends the process at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather
from transformers import TrainerCallback

from rl_training.hosts.trl.settings.rollout_shape import steps_per_rollout
from rl_training.job.errors import SIGNALS

# Environment variables that accelerate launch and torchrun set for the processes that they start.
LAUNCHER_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
ECHO_SECONDS = 2.0  # a launcher forwards a signal that the terminal has already sent: not a second one


class StopAtStepEnd(TrainerCallback):
    """Ends training after the step in which a signal arrives. `signum` is then its number, and 0 otherwise."""

    def __init__(self) -> None:
        self.signum = 0
        self._request = 0  # the signal that this process received
        self._requested_at = 0.0
        was_launched = any(name in os.environ for name in LAUNCHER_VARIABLES)
        self._launcher = os.getppid() if was_launched else None  # a shell may exit before this process does

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside this context, and restore the earlier handlers afterwards."""
        if threading.current_thread() is not threading.main_thread():  # Python forbids handlers elsewhere
            yield
            return
        before = {signum: signal.signal(signum, self._on_signal) for signum in SIGNALS}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._request and now - self._requested_at > ECHO_SECONDS:
            self._print_on_main(f"ended by {signal.Signals(signum).name}")
            os._exit(128 + signum)  # no cleanup: processes that clean up would wait for one another
        if not self._request:
            self._requested_at = now  # first: another signal may arrive before the next line
            self._request = signum
            self._print_on_main(
                f"{signal.Signals(signum).name}: stopping after this step, with a checkpoint and the report; "
                "a second signal ends at once"
            )

    def _print_on_main(self, line: str) -> None:
        if PartialState().is_main_process:
            os.write(2, f"\n{line}\n".encode())  # a signal handler may interrupt print

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._launcher not in (None, os.getppid()) and not self._request:
            self._request = signal.SIGTERM
            self._print_on_main("the launcher has ended: stopping after this step, with a checkpoint and the report")
        local_request = torch.tensor([self._request], device=PartialState().device)
        request = int(gather(local_request).max())
        # A rollout that later steps still use is not saved, so training resumes exactly only at the end of a rollout.
        if request and state.global_step % steps_per_rollout(args) == 0:
            self.signum = request
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False

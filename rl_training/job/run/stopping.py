"""Ends a training at the end of the step in which a signal arrives.

SIGINT (Ctrl-C), SIGTERM (from `kill`, or from Slurm before it preempts) and a launcher that has died request the end:
training finishes the step and writes a checkpoint from which it resumes exactly. A request to one of several processes
suffices: they agree at the end of each step. hosts/trl/output/end_request.py handles the signals.
"""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather
from transformers import TrainerCallback

from rl_training.hosts.trl.output.end_request import EndRequest, print_on_main
from rl_training.hosts.trl.settings.rollout_shape import steps_per_rollout
from rl_training.job.errors import SIGNALS

# Environment variables that accelerate launch and torchrun set for the processes that they start.
LAUNCHER_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
PROMISE = "stopping after this step, with a checkpoint and the report"


class StopAtStepEnd(TrainerCallback):
    """Ends training after the step in which a signal arrives. `signum` is then its number, and 0 otherwise."""

    def __init__(self) -> None:
        self.signum = 0
        self.request = EndRequest(SIGNALS, PROMISE, ends_forks=False)  # to this process
        was_launched = any(name in os.environ for name in LAUNCHER_VARIABLES)
        self._launcher = os.getppid() if was_launched else None  # a shell may exit before this process does

    def listening(self) -> AbstractContextManager[None]:
        """Handle signals inside this context, and restore the earlier handlers afterwards."""
        return self.request.listening()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._launcher not in (None, os.getppid()) and not self.request.signum:
            self.request.signum = signal.SIGTERM
            print_on_main(f"the launcher has ended: {PROMISE}")
        local_request = torch.tensor([self.request.signum], device=PartialState().device)
        request = int(gather(local_request).max())
        # A rollout that later steps still use is not saved, so training resumes exactly only at the end of a rollout.
        if request and state.global_step % steps_per_rollout(args) == 0:
            self.signum = request
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False

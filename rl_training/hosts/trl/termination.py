"""SIGTERM, with which Slurm, Kubernetes and `kill` tell a process to end: it writes what was measured, and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class Termination:
    """Listens for SIGTERM, writes once it comes, and lets the process end as it would have without.

    The handler of before has the last word: the default one ends the process, and one of the user's may go on.
    """

    def __init__(self, write: Callable[[], object]) -> None:
        """Prepare to listen.

        Args:
            write: Writes what there is; it may be called in the middle of anything, and is no collective.
        """
        self._write = write
        self._before: Callable[..., object] | int | None = None  # the handler that this one stands in front of
        self._process = 0  # that listens: its forks inherit the handler

    def listen(self) -> None:
        """Handle the signal, until `release`. In other threads than the main one Python allows no handlers."""
        before = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN, self._take):
            return
        self._before, self._process = before, os.getpid()
        signal.signal(signal.SIGTERM, self._take)

    def release(self) -> None:
        """Put the handler of before in its place, unless somebody has set another one meanwhile."""
        if self._before is not None and signal.getsignal(signal.SIGTERM) == self._take:
            signal.signal(signal.SIGTERM, self._before)
        self._before = None

    def _take(self, signum: int, frame: FrameType | None) -> None:
        before = self._before
        self.release()  # a second signal ends the process at once
        if os.getpid() == self._process:
            with contextlib.suppress(Exception):  # whatever it is, the process is to end
                self._write()
        if callable(before):
            before(signum, frame)
            self.listen()  # it has returned, so training goes on
        else:
            os.kill(os.getpid(), signum)

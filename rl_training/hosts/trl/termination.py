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
        # The handler that this one stands in front of, also once it is released: another may still call it.
        self._before: Callable[..., object] | int = signal.SIG_DFL
        self._is_listening = self._is_taking = False
        self._process = 0  # that listens: its forks inherit the handler

    def listen(self) -> None:
        """Handle the signal, until `release`. In other threads than the main one Python allows no handlers."""
        before = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
            return
        self._is_listening, self._process = True, os.getpid()
        if before != self._take:
            self._before = before
            signal.signal(signal.SIGTERM, self._take)

    def release(self) -> None:
        """Put the handler of before in its place, unless somebody has set another one meanwhile."""
        if signal.getsignal(signal.SIGTERM) == self._take:
            signal.signal(signal.SIGTERM, self._before)
        self._is_listening = False

    def _take(self, signum: int, frame: FrameType | None) -> None:
        before = signal.SIG_DFL if self._is_taking else self._before  # else it is the one that has called this one
        writes = self._is_listening and os.getpid() == self._process
        self.release()  # a second signal ends the process at once
        self._is_taking = True
        try:
            if writes:
                with contextlib.suppress(Exception):  # whatever it is, the process is to end
                    self._write()
            if not callable(before):
                signal.signal(signum, signal.SIG_DFL)  # a later handler that calls this one may stand in front
                os.kill(os.getpid(), signum)
                return
            before(signum, frame)
        finally:
            self._is_taking = False
        self._is_listening = writes  # it has returned, so training goes on
        if writes and signal.getsignal(signum) == before:
            signal.signal(signum, self._take)

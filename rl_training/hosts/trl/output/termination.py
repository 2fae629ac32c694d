"""Writes what was measured when SIGTERM arrives, with which Slurm, Kubernetes and `kill` tell a process to end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class Termination:
    """Listens for SIGTERM, writes as soon as it arrives, and then calls the previous handler.

    That handler decides what happens next: the default one ends the process, a user's own may let training continue.

    Args:
        write: Writes what was measured. It may be called at any point of the program, and must not be collective.
    """

    def __init__(self, write: Callable[[], object]) -> None:
        self._write = write
        # Kept after `release`, because a later handler may still call this one.
        self._previous_handler: Callable[..., object] | int = signal.SIG_DFL
        self._is_listening = False
        self._is_handling = False
        self._listening_pid = 0  # its forks inherit the handler but must not write

    def listen(self) -> None:
        """Handle the signal, until `release`. Does nothing outside the main thread, where Python allows no handlers."""
        current = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or current in (None, signal.SIG_IGN):
            return
        self._is_listening = True
        self._listening_pid = os.getpid()
        if current != self._handle:
            self._previous_handler = current
            signal.signal(signal.SIGTERM, self._handle)

    def release(self) -> None:
        """Restore the previous handler, unless someone else has set another one meanwhile."""
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous_handler)
        self._is_listening = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # If nested, the previous handler called this one.
        previous = signal.SIG_DFL if self._is_handling else self._previous_handler
        must_write = self._is_listening and os.getpid() == self._listening_pid
        self.release()  # a second signal ends the process at once
        self._is_handling = True
        try:
            if must_write:
                with contextlib.suppress(Exception):  # no error may keep the process from ending
                    self._write()
            if not callable(previous):
                signal.signal(signum, signal.SIG_DFL)  # a later handler, which called this one, may still be set
                os.kill(os.getpid(), signum)
                return
            previous(signum, frame)
        finally:
            self._is_handling = False
        self._is_listening = must_write  # the previous handler returned, so training goes on
        if must_write and signal.getsignal(signum) == previous:
            signal.signal(signum, self._handle)

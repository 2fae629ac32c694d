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
    """

    def __init__(self, write: Callable[[], object]) -> None:
        """Prepare to listen.

        Args:
            write: Writes what was measured. It may be called at any point of the program, and must not be collective.
        """
        self._write = write
        # The previous handler. Kept after `release`, because a later handler may still call this one.
        self._before: Callable[..., object] | int = signal.SIG_DFL
        self._is_listening = self._is_taking = False
        self._process = 0  # process that listens; its forks inherit the handler but must not write

    def listen(self) -> None:
        """Handle the signal, until `release`. Does nothing outside the main thread, where Python allows no handlers."""
        before = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
            return
        self._is_listening, self._process = True, os.getpid()
        if before != self._take:
            self._before = before
            signal.signal(signal.SIGTERM, self._take)

    def release(self) -> None:
        """Restore the previous handler, unless someone else has set another one meanwhile."""
        if signal.getsignal(signal.SIGTERM) == self._take:
            signal.signal(signal.SIGTERM, self._before)
        self._is_listening = False

    def _take(self, signum: int, frame: FrameType | None) -> None:
        before = signal.SIG_DFL if self._is_taking else self._before  # if nested, the previous handler called this one
        writes = self._is_listening and os.getpid() == self._process
        self.release()  # a second signal ends the process at once
        self._is_taking = True
        try:
            if writes:
                with contextlib.suppress(Exception):  # no error may keep the process from ending
                    self._write()
            if not callable(before):
                signal.signal(signum, signal.SIG_DFL)  # a later handler, which called this one, may still be set
                os.kill(os.getpid(), signum)
                return
            before(signum, frame)
        finally:
            self._is_taking = False
        self._is_listening = writes  # the previous handler returned, so training goes on
        if writes and signal.getsignal(signum) == before:
            signal.signal(signum, self._take)

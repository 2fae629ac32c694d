"""Notes that a signal has asked this process to end, so that training can end where nothing is half written.

Slurm, Kubernetes and `kill` send SIGTERM, Ctrl-C sends SIGINT. The handler only notes the signal and prints a line:
whoever listens looks at `signum` at the end of each step. `attach` then writes its report and lets the signal end the
process; a command also writes a checkpoint (job/run/stopping.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from accelerate import PartialState

ECHO_SECONDS = 2.0  # a launcher forwards a signal that the terminal has already sent: not a second one


class EndRequest:
    """The first signal that has asked this process to end. A second one ends the process at once.

    Args:
        signals: The signals.
        promise: What is printed after the name of the first one: what happens until the process ends.
        loss: What is printed after the name of the second one: what is then missing.
        ends_forks: Whether a signal ends forks of this process, such as workers that it terminates, as if it was not
            handled. If not, forks outlive the first signal, which a terminal sends to them too.

    Attributes:
        signum: The number of the first signal. 0 until one arrives.
    """

    def __init__(self, signals: Sequence[signal.Signals], promise: str, *, loss: str = "", ends_forks: bool) -> None:
        self._signals = signals
        self._promise = promise
        self._loss = loss
        self.signum = 0
        self._noted_at = 0.0
        self._is_over = False  # whether nobody looks at `signum` any more
        self._ends_forks = ends_forks
        self._pid = os.getpid()  # its forks inherit the handlers

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside this context, and restore the earlier handlers, unless others are set meanwhile."""
        if threading.current_thread() is not threading.main_thread():  # Python forbids handlers elsewhere
            yield
            return
        before = {signum: signal.signal(signum, self.on_signal) for signum in self._signals}
        try:
            yield
        finally:
            self._is_over = True  # a handler that was set meanwhile may still call this one
            for signum, handler in before.items():
                if signal.getsignal(signum) == self.on_signal:
                    signal.signal(signum, handler)

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Note the signal, or end the process if it is the second one. Called at any point of the program."""
        if self._is_over or (self._ends_forks and os.getpid() != self._pid):
            end_process(signum)
            return
        now = time.monotonic()
        if self.signum and now - self._noted_at > ECHO_SECONDS:
            print_on_main(f"ended by {signal.Signals(signum).name}{self._loss}")
            os._exit(128 + signum)  # no cleanup: processes that clean up would wait for one another
        if not self.signum:
            self._noted_at = now  # first: another signal may arrive before the next line
            self.signum = signum
            print_on_main(f"{signal.Signals(signum).name}: {self._promise}; a second signal ends at once")


def print_on_main(line: str) -> None:
    """Print a line on the main process, from a signal handler too, which may have interrupted print."""
    if PartialState().is_main_process:
        os.write(2, f"\n{line}\n".encode())


def end_process(signum: int) -> None:
    """End this process as the signal does if nobody handles it."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def request_of_process(signum: signal.Signals) -> EndRequest | None:
    """Return what handles a signal, if that is an EndRequest: of another training of this process."""
    owner = getattr(signal.getsignal(signum), "__self__", None)
    return owner if isinstance(owner, EndRequest) else None

"""Names the process that the others wait for: one hanging reward function would silently stop all processes.

In each process a thread publishes, through the process group's store, how many collectives its process has begun (torch
counts them) and where its main thread is. When no process makes progress, the others wait for those that have begun
fewer collectives. Training itself is unchanged: the thread adds no collective and draws no random number.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch.distributed import distributed_c10d
from transformers.utils import logging

from rl_training.errors import UserError

logger = logging.get_logger(__name__)

PATIENCE = 60.0  # seconds of waiting before the first warning; the wait doubles before each further one
RANKS_PER_SECOND = 8  # limits the load of the store: with more ranks, each publishes less often
SECONDS_TO_STOP = 2.0  # how long the process waits for the thread when it exits
TIMEOUT_MESSAGES = ("Timed out waiting", "Connection closed by peer", "timed out")  # messages of gloo on either side
PYTHON = sysconfig.get_path("stdlib")
INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class RankStatus:
    """State that a process publishes for the others."""

    collectives: int  # number of collectives that it has begun
    place: str  # where its main thread is
    process: str


class WaitingWatch:
    """The watching thread of one process. Create it on every process once the process group is open.

    Args:
        patience: Seconds of waiting before the first warning.
        every: Seconds between two looks at the store. None chooses them by the number of ranks.
    """

    def __init__(self, patience: float = PATIENCE, every: float | None = None) -> None:
        self._rank = dist.get_rank()
        self._size = dist.get_world_size()
        self._patience = patience
        self._every = every or max(1.0, self._size / RANKS_PER_SECOND)
        # Needs a separate connection: the main thread may block on its own.
        self._store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._process = f"process {os.getpid()} on {os.uname().nodename}"
        self._statuses: list[RankStatus] = []  # last seen statuses of all processes
        self._last_progress = time.monotonic()  # when any process was last seen to have begun a collective
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="who is waited for", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # Python would crash on exit while a thread is inside torch

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(SECONDS_TO_STOP)
        atexit.unregister(self.close)

    def missing(self) -> str:
        """Describe the processes that this process and others wait for; "" if this process waits for none."""
        counts = [status.collectives for status in self._statuses]
        if not counts or counts[self._rank] < max(counts):
            return ""
        return " and ".join(
            f"rank {rank} ({status.process}), last seen at {status.place}"
            for rank, status in enumerate(self._statuses)
            if status.collectives < max(counts)
        )

    def _run(self) -> None:
        patience = self._patience
        with contextlib.suppress(RuntimeError):  # raised by the store if the process that hosts it is gone
            while not self._stopped.wait(self._every):
                self._exchange()
                waited = time.monotonic() - self._last_progress
                if waited >= patience and self._is_first_that_waits():
                    logger.warning(f"waiting for {waited:.0f} s for {self.missing()}")
                    patience = 2 * waited  # avoids a warning at every step if steps are slow

    def _exchange(self) -> None:
        """Publish this process's status, and read those of all processes."""
        status = [_collectives_begun(), _place_of_main_thread(), self._process]
        self._store.set(_key(self._rank), json.dumps(status))
        keys = [_key(rank) for rank in range(self._size)]
        if not self._store.check(keys):  # a rank has not published yet, and multi_get would block
            return
        before = [status.collectives for status in self._statuses]
        self._statuses = [RankStatus(*json.loads(message)) for message in self._store.multi_get(keys)]
        if before != [status.collectives for status in self._statuses]:
            self._last_progress = time.monotonic()

    def _is_first_that_waits(self) -> bool:
        counts = [status.collectives for status in self._statuses]
        return bool(self.missing()) and self._rank == counts.index(max(counts))


def _key(rank: int) -> str:
    return f"rl_training/collectives/{rank}"


def _collectives_begun() -> int:
    """Return how many collectives this process has begun in the groups that contain all processes."""
    total = 0
    for group in list(distributed_c10d._world.pg_map):
        if group.size() == dist.get_world_size():
            with contextlib.suppress(RuntimeError):  # the backend does not count
                total += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return total


def _place_of_main_thread() -> str:
    """Return the innermost line of the main thread that is outside Python's standard library."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and _is_of_python(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "an unknown place"


def _is_of_python(file: str) -> bool:
    return file.startswith(("<", PYTHON)) and not any(folder in Path(file).parts for folder in INSTALLED)


_watches: list[WaitingWatch] = []  # at most one per process


def watch_for_waiting() -> None:
    """Start the watch of this process, unless it runs already or there is only one process."""
    if dist.is_initialized() and dist.get_world_size() > 1 and not _watches:
        _watches.append(WaitingWatch())


@contextlib.contextmanager
def timeouts_explained(seconds: float) -> Iterator[None]:
    """Turn the timeout of a collective, after this many seconds, into a UserError that names the missing processes."""
    try:
        yield
    except RuntimeError as error:
        missing = _watches[0].missing() if _watches and any(words in str(error) for words in TIMEOUT_MESSAGES) else ""
        if not missing:
            raise
        raise UserError(
            f"waited for more than trainer.ddp_timeout={seconds:g} s for {missing}: fix what hangs there, or raise "
            "trainer.ddp_timeout; then go on with resume=latest"
        ) from error

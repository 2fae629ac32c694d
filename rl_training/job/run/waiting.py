"""Names the process that the others wait for: one whose reward function hangs would stop all of them without a word.

A thread of each process tells the others, over the store by which they have met, how many collectives its process has
begun (torch counts them) and where its main thread is. Of processes that stand still, those that have begun fewer than
others are waited for. Training itself is not touched: no collective is added, no random number is drawn.
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

PATIENCE = 60.0  # seconds of waiting after which a line says so; the next one comes after twice as long
RANKS_PER_SECOND = 8  # the store hears from so many: of more, each speaks more rarely
SECONDS_TO_STOP = 2.0  # for which the end of the process waits for the thread
TIMED_OUT = ("Timed out waiting", "Connection closed by peer", "timed out")  # what gloo says on one side, or the other
PYTHON = sysconfig.get_path("stdlib")
INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Sign:
    """What a process tells the others."""

    collectives: int  # that it has begun
    place: str  # where its main thread is
    process: str


class WaitingWatch:
    """The thread, in one of several processes. Make it on all of them, once the process group is open.

    patience, every  seconds: of waiting before a line, and between two looks
    """

    def __init__(self, patience: float = PATIENCE, every: float | None = None) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._patience, self._every = patience, every or max(1.0, self._size / RANKS_PER_SECOND)
        # With a connection of its own it does not wait where the main thread waits.
        self._store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._process = f"process {os.getpid()} on {os.uname().nodename}"
        self._signs: list[Sign] = []  # of all processes, as they were seen last
        self._since = time.monotonic()  # when one of them last began a collective
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="who is waited for", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside of torch while Python ends would end it in a crash

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(SECONDS_TO_STOP)
        atexit.unregister(self.close)

    def missing(self) -> str:
        """Return which processes others wait for, this one among those, in words; "" where it waits for none."""
        counts = [sign.collectives for sign in self._signs]
        if not counts or counts[self._rank] < max(counts):
            return ""
        return " and ".join(
            f"rank {rank} ({sign.process}), last seen at {sign.place}"
            for rank, sign in enumerate(self._signs)
            if sign.collectives < max(counts)
        )

    def _run(self) -> None:
        patience = self._patience
        with contextlib.suppress(RuntimeError):  # of the store: the process that keeps it is gone
            while not self._stopped.wait(self._every):
                self._look()
                waited = time.monotonic() - self._since
                if waited >= patience and self._is_first_that_waits():
                    logger.warning(f"waiting for {waited:.0f} s for {self.missing()}")
                    patience = 2 * waited  # where each step takes long, not a line at each

    def _look(self) -> None:
        """Tell the others how far this process is, and read how far they are."""
        sign = [_collectives_begun(), _place_of_main_thread(), self._process]
        self._store.set(_key(self._rank), json.dumps(sign))
        keys = [_key(rank) for rank in range(self._size)]
        if not self._store.check(keys):  # one has not spoken yet, and getting would wait for it
            return
        before = [sign.collectives for sign in self._signs]
        self._signs = [Sign(*json.loads(told)) for told in self._store.multi_get(keys)]
        if before != [sign.collectives for sign in self._signs]:
            self._since = time.monotonic()

    def _is_first_that_waits(self) -> bool:
        counts = [sign.collectives for sign in self._signs]
        return bool(self.missing()) and self._rank == counts.index(max(counts))


def _key(rank: int) -> str:
    return f"rl_training/collectives/{rank}"


def _collectives_begun() -> int:
    """Return how many collectives of all processes this one has begun, of every group that has all of them."""
    total = 0
    for group in list(distributed_c10d._world.pg_map):
        if group.size() == dist.get_world_size():
            with contextlib.suppress(RuntimeError):  # a backend that does not count
                total += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return total


def _place_of_main_thread() -> str:
    """Return the line that the main thread is in, the innermost that is not of Python's own library."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and _is_of_python(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "an unknown place"


def _is_of_python(file: str) -> bool:
    return file.startswith(("<", PYTHON)) and not any(folder in Path(file).parts for folder in INSTALLED)


_watches: list[WaitingWatch] = []  # of this process: one


def watch_for_waiting() -> None:
    """Start the watch in a process of several, if it has none yet."""
    if dist.is_initialized() and dist.get_world_size() > 1 and not _watches:
        _watches.append(WaitingWatch())


@contextlib.contextmanager
def timeouts_explained(seconds: float) -> Iterator[None]:
    """Turn a collective's timeout, which comes after so many seconds, into a UserError that names who is missing."""
    try:
        yield
    except RuntimeError as error:
        missing = _watches[0].missing() if _watches and any(words in str(error) for words in TIMED_OUT) else ""
        if not missing:
            raise
        raise UserError(
            f"waited for more than trainer.ddp_timeout={seconds:g} s for {missing}: mend what hangs there, or raise "
            "trainer.ddp_timeout; then go on with resume=latest"
        ) from error

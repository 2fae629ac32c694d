"""If one process does not arrive, the others say which one it is, and end after the requested timeout."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import forks
import pytest
import torch
import torch.distributed as dist
from configs import QUICK, composed

from rl_training.job.run import waiting
from rl_training.job.run.folder import open_run_folder
from rl_training.job.run.waiting import WaitingWatch, timeouts_explained

PATIENCE = 1.0


def lines_to(file: Path) -> None:
    """Send this process's warnings about waiting only to a file."""
    handler = logging.FileHandler(file, delay=False)
    waiting.logger.addHandler(handler)
    waiting.logger.propagate = False


def meet(folder: str) -> None:
    """Open a launch's process group as a training does, with a watch that has little patience."""
    open_run_folder(composed("train", f"run_dir={folder}/run", "++trainer.ddp_timeout=3", *QUICK))
    (watch,) = waiting._watches
    watch.close()
    waiting._watches[:] = [WaitingWatch(PATIENCE, every=0.05)]


def hang(seconds: float) -> None:
    time.sleep(seconds)


def one_is_late(rank: int, folder: str) -> None:
    lines_to(Path(folder) / f"said_{rank}")
    meet(folder)
    for late in (None, 0, 1):
        if late is None:
            time.sleep(1.5 * PATIENCE)  # both processes compute
        elif rank == late:
            hang(1.5 * PATIENCE)
        dist.all_reduce(torch.ones(1))


def test_a_message_names_the_process_waited_for_and_where_it_is(tmp_path: Path) -> None:
    """First rank 0, then rank 1. While both compute for the same time, there is no line."""
    forks.start_ranks(one_is_late, (str(tmp_path),), 2)
    said = {rank: (tmp_path / f"said_{rank}").read_text(encoding="utf-8").splitlines() for rank in (0, 1)}
    for rank, late in ((1, 0), (0, 1)):
        (line,) = said[rank]
        assert line.startswith(f"waiting for 1 s for rank {late} (process "), line
        assert f" on {os.uname().nodename}), last seen at {__file__}:" in line
        assert line.endswith(" in hang")


def never_comes(rank: int, folder: str) -> None:
    meet(folder)
    if rank == 1:
        hang(60)
    start = time.monotonic()
    try:
        with timeouts_explained(3):
            dist.all_reduce(torch.ones(1))
    except ValueError as error:
        (Path(folder) / "ended").write_text(f"{time.monotonic() - start}\n{error}", encoding="utf-8")
    os._exit(7)


def test_the_requested_timeout_applies_and_names_the_missing_process(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 7"):
        forks.start_ranks(never_comes, (str(tmp_path),), 2)
    seconds, error = (tmp_path / "ended").read_text(encoding="utf-8").splitlines()
    assert 2.9 < float(seconds) < 20
    assert error.startswith("waited for more than trainer.ddp_timeout=3 s for rank 1 (process ")
    assert "in hang: fix what hangs there, or raise trainer.ddp_timeout" in error

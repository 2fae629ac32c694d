"""Processes that start warm: forked from one that has imported torch, TRL and this package once, ten seconds each time.

The parent of the forks is multiprocessing's fork server, a process apart from pytest: a fork of pytest itself would
inherit its threads. It starts with the first process asked for, and ends with pytest.

    run("train.py", "probe=simple")     a program, as `python train.py probe=simple` at the root of the repository
    start_ranks(worker, (folder,), 2)   worker(rank, folder) in two processes that meet by torch.distributed
"""

from __future__ import annotations

import gc
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch.multiprocessing

ROOT = Path(__file__).parents[1]
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "trl.trainer.grpo_trainer", "peft", "hydra", "rl_training.job.build"])


def run(*command: str, env: Mapping[str, str] | None = None, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Returns what a Python program of the repository said and how it ended: `run("train.py", "--help")`.

    env  its whole environment, by default this one. What a library reads while it is imported was read before the fork
    """
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        environment = dict(os.environ if env is None else env)
        process = SERVER.Process(target=_program, args=(command, environment, *map(str, said)))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout, *(path.read_bytes() for path in said))
        assert process.exitcode is not None
        return subprocess.CompletedProcess(command, process.exitcode, *(path.read_text("utf-8") for path in said))


def _program(command: Sequence[str], env: Mapping[str, str], stdout: str, stderr: str) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    gc.freeze()  # as conftest.py does
    sys.argv = list(command)
    sys.path.insert(0, str((ROOT / command[0]).parent))  # as Python does for a script
    runpy.run_path(command[0], run_name="__main__")


def start_ranks(worker: Callable[..., None], args: tuple[Any, ...], processes: int) -> None:
    """Calls worker(rank, *args) in so many processes with a launcher's environment, and waits for them.

    An exception in one of them is raised here.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        _rank, (worker, args, processes, port), nprocs=processes, start_method="forkserver"
    )


def _rank(rank: int, worker: Callable[..., None], args: tuple[Any, ...], processes: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    gc.freeze()
    worker(rank, *args)

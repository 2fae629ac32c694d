"""Processes that start warm: forked from one that has imported torch, TRL and this package once, ten seconds each time.

The parent of the forks is multiprocessing's fork server, and that a fork of pytest, from the moment when all tests were
collected: it has their imports, and no thread that a test has started since. It ends with pytest.

    run("train.py", "probe=simple")     a program, as `python train.py probe=simple` at the root of the repository
    start_ranks(worker, (folder,), 2)   worker(rank, folder) in two processes that meet by torch.distributed
    run_on_ranks(("train.py",), 2)      a program in two such processes, as torchrun starts it
"""

from __future__ import annotations

import contextlib
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, get_context, resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock

import torch.multiprocessing
import trl.trainer.grpo_trainer  # noqa: F401, for the forks

import rl_training.job.build  # noqa: F401

with contextlib.suppress(ImportError), mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"):
    import deepspeed  # noqa: F401, which accelerate imports at the first training of a process, where it is installed

ROOT = Path(__file__).parents[1]
SERVER = get_context("forkserver")


def start_server() -> None:
    """Starts the fork server as a fork of this process: multiprocessing would start a Python that knows nothing."""

    def fork(path: bytes, args: Sequence[bytes], descriptors: Sequence[int]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                _serve(*descriptors)
            finally:
                os._exit(0)
        return pid

    resource_tracker.ensure_running()  # which would else be started, and by the same means, now
    with mock.patch("multiprocessing.util.spawnv_passfds", fork):
        forkserver.ensure_running()


def _serve(listener: int, alive: int) -> None:
    """Forks whatever is asked for, until the last writer of the pipe `alive` has ended."""
    pipe = os.fstat(alive).st_ino
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # the folder's own
            if descriptor != alive and os.fstat(descriptor).st_ino == pipe:
                os.close(descriptor)  # the other end: this process must not keep itself alive
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # pytest has its own
    forkserver._forkserver.__init__()  # else a process that starts a server of its own would wait for this one's lock
    forkserver.main(listener, alive, preload=[])


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
    _run(command)


def _run(command: Sequence[str]) -> None:
    os.chdir(ROOT)
    sys.argv = list(command)
    sys.path.insert(0, str((ROOT / command[0]).parent))  # as Python does for a script
    runpy.run_path(command[0], run_name="__main__")


def begin_ranks(
    worker: Callable[..., None], args: tuple[Any, ...], processes: int
) -> torch.multiprocessing.ProcessContext:
    """Returns so many processes, in which worker(rank, *args) was called with a launcher's environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return torch.multiprocessing.start_processes(
        _rank, (worker, args, processes, port), nprocs=processes, join=False, start_method="forkserver"
    )


def start_ranks(worker: Callable[..., None], args: tuple[Any, ...], processes: int) -> None:
    """Calls worker(rank, *args) in so many processes and waits for them. An exception in one of them is raised here."""
    ranks = begin_ranks(worker, args, processes)
    while not ranks.join():
        pass


def run_on_ranks(command: Sequence[str], processes: int, **env: str) -> None:
    """Runs a program of the repository in so many processes, with these variables beside a launcher's."""
    start_ranks(program_on_rank, (tuple(command), env), processes)


def program_on_rank(rank: int, command: Sequence[str], env: Mapping[str, str]) -> None:
    os.environ |= env
    _run(command)


def _rank(rank: int, worker: Callable[..., None], args: tuple[Any, ...], processes: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    worker(rank, *args)

"""Processes that start warm: forked from one that has imported torch, TRL and this package once, ten seconds each time.

That one is itself a fork of pytest, from the moment when all tests were collected: it has their imports, and no thread
that a test has started since. It ends with pytest.

    in_fork(function, *args)            what a function returns, called in a fork of it
    run("train.py", "probe=simple")     a program, as `python train.py probe=simple` at the root of the repository
    start_ranks(worker, (folder,), 2)   worker(rank, folder) in two processes that meet by torch.distributed
    run_on_ranks(("train.py",), 2)      a program in two such processes, as torchrun starts it
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch.distributed as dist
import torch.multiprocessing
import trl.trainer.grpo_trainer  # noqa: F401, for the forks
from accelerate.utils.other import get_free_port

import rl_training.job.run.training  # noqa: F401

with contextlib.suppress(ImportError), mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"):
    import deepspeed  # noqa: F401, which accelerate imports at the first training of a process, where it is installed

ROOT = Path(__file__).parents[2]
FORK = get_context("fork")


def start_server() -> None:
    """Fork the process that every other one is a fork of."""
    global _server
    _server, asked = FORK.Pipe()
    if os.fork() == 0:
        _server.close()
        _serve(asked)
    asked.close()


def _serve(asked: Connection) -> NoReturn:
    """Call each function that is asked for in a fork of its own, until the one who asks has ended."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # pytest has its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is pytest's
    with contextlib.suppress(EOFError):
        while True:
            call = asked.recv()
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                try:
                    asked.send((call(), ""))
                except BaseException:
                    asked.send((None, traceback.format_exc()))
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            if status:
                asked.send((None, f"it ended with {os.waitstatus_to_exitcode(status)}"))
    os._exit(0)


def in_fork(function: Callable[..., Any], *args: Any) -> Any:
    """Return what the function returns in a process of its own. An exception is raised here, as its traceback."""
    _server.send(functools.partial(function, *args))
    result, failure = _server.recv()
    if failure:
        raise RuntimeError(failure)
    return result


def run(*command: str, env: Mapping[str, str] | None = None, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Return what a Python program of the repository said and how it ended: `run("train.py", "--help")`.

    env  its whole environment, by default this one. What a library reads while it is imported was read before the fork
    """
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        environment = dict(os.environ if env is None else env)
        code = in_fork(_exit_code, timeout, command, environment, *map(str, said))
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout, *(path.read_bytes() for path in said))
        return subprocess.CompletedProcess(command, code, *(path.read_text("utf-8") for path in said))


def _exit_code(timeout: float, *args: Any) -> int | None:
    process = FORK.Process(target=_program, args=args)
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
    return process.exitcode


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
    """Return so many processes, in which worker(rank, *args) was called with a launcher's environment. In a fork."""
    return torch.multiprocessing.start_processes(
        _rank, (worker, args, processes, get_free_port()), nprocs=processes, join=False, start_method="fork"
    )


def start_ranks(worker: Callable[..., None], args: tuple[Any, ...], processes: int) -> None:
    """Call worker(rank, *args) in so many processes and wait for them. An exception in one of them is raised here."""
    in_fork(_join_ranks, worker, args, processes)


def _join_ranks(*args: Any) -> None:
    ranks = begin_ranks(*args)
    while not ranks.join():
        pass


def run_on_ranks(command: Sequence[str], processes: int, **env: str) -> None:
    """Run a program of the repository in so many processes, with these variables beside a launcher's."""
    start_ranks(program_on_rank, (tuple(command), env), processes)


def program_on_rank(rank: int, command: Sequence[str], env: Mapping[str, str]) -> None:
    os.environ |= env
    _run(command)


def _rank(rank: int, worker: Callable[..., None], args: tuple[Any, ...], processes: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    worker(rank, *args)
    if worker is not program_on_rank and dist.is_initialized():
        dist.barrier()
        os._exit(0)  # no teardown: freeing DDP's gloo group holds the GIL and waits for a thread that may want it

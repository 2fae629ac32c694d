"""Processes that start fast: forks of a server that has imported torch, TRL and this package, which takes ten seconds.

The server is itself a fork of pytest, made when all tests were collected. So it has their imports, but no thread that a
test started later. It ends with pytest.

    in_fork(function, *args)            call a function in a fork of the server, and return its result
    run("train.py", "probe=simple")     run a program like `python train.py probe=simple` at the repository's root
    start_ranks(worker, (folder,), 2)   worker(rank, folder) in two processes connected by torch.distributed
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
    """Fork the server from which all other processes are forked."""
    global _server
    _server, asked = FORK.Pipe()
    if os.fork() == 0:
        _server.close()
        _serve(asked)
    asked.close()


def _serve(asked: Connection) -> NoReturn:
    """Call each requested function in a new fork, until the requesting process has ended."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # pytest replaces these
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest handles Ctrl-C
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
    """Call a function in a separate process and return its result. An exception there is raised here as a traceback."""
    _server.send(functools.partial(function, *args))
    result, failure = _server.recv()
    if failure:
        raise RuntimeError(failure)
    return result


def run(
    *command: str, env: Mapping[str, str] | None = None, timeout: float = 600, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a Python program of the repository, as in `run("train.py", "--help")`. Return its output and exit code.

    Args:
        env: Its whole environment, by default that of this process. Variables that a library reads on import have no
            effect, because the imports happened before the fork.
        folder: The working folder. The program is named relative to the repository's root all the same.
    """
    with tempfile.TemporaryDirectory() as temporary:
        said = [Path(temporary) / name for name in ("stdout", "stderr")]
        environment = dict(os.environ if env is None else env)
        code = in_fork(_exit_code, timeout, command, folder, environment, *map(str, said))
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


def _program(command: Sequence[str], folder: Path, env: Mapping[str, str], stdout: str, stderr: str) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    _run(command, folder)


def _run(command: Sequence[str], folder: Path = ROOT) -> None:
    os.chdir(folder)
    sys.argv = list(command)
    sys.path.insert(0, str((ROOT / command[0]).parent))  # as Python does for a script
    runpy.run_path(str(ROOT / command[0]), run_name="__main__")


def begin_ranks(
    worker: Callable[..., None], args: tuple[Any, ...], processes: int
) -> torch.multiprocessing.ProcessContext:
    """Start `processes` processes that call worker(rank, *args) with a launcher's environment. Call this in a fork."""
    return torch.multiprocessing.start_processes(
        _rank, (worker, args, processes, get_free_port()), nprocs=processes, join=False, start_method="fork"
    )


def start_ranks(worker: Callable[..., None], args: tuple[Any, ...], processes: int) -> None:
    """Call worker(rank, *args) in `processes` processes and wait for them. An exception in any of them is raised."""
    in_fork(_join_ranks, worker, args, processes)


def _join_ranks(*args: Any) -> None:
    ranks = begin_ranks(*args)
    while not ranks.join():
        pass


def run_on_ranks(command: Sequence[str], processes: int, folder: Path = ROOT, **env: str) -> None:
    """Run a program of the repository in `processes` processes, with a launcher's variables and these."""
    start_ranks(program_on_rank, (tuple(command), env, folder), processes)


def program_on_rank(rank: int, command: Sequence[str], env: Mapping[str, str], folder: Path = ROOT) -> None:
    os.environ |= env
    _run(command, folder)


def _rank(rank: int, worker: Callable[..., None], args: tuple[Any, ...], processes: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    worker(rank, *args)
    if worker is not program_on_rank and dist.is_initialized():
        dist.barrier()
        os._exit(0)  # no teardown: freeing DDP's gloo group holds the GIL and waits for a thread that may need the GIL

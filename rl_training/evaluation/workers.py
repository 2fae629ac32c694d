"""Runs work in a separate process: receives what it sends, frees its memory when it ends, and reports why it ended."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

from rl_training.errors import one_line

Send = Callable[[Any], None]


def run_in_process(
    work: Callable[[Send], None],
    receive: Callable[[Any], None],
    imports: Sequence[str] = (),
    if_out_of_memory: str = "",
) -> str:
    """Run `work` in a separate process and pass every object that it sends to `receive` as it arrives.

    The process inherits nothing, no CUDA context and no threads. It ends when this process ends.

    Args:
        imports: Modules that are slow to import. On Linux a fork server imports them once for all processes.
        if_out_of_memory: What the user can do about work that runs out of memory, for the reason.

    Returns:
        Why the work failed, in one line. Empty if it succeeded.
    """
    context: ForkServerContext | SpawnContext = multiprocessing.get_context("spawn")
    if sys.platform == "linux":  # on other systems some libraries do not survive a fork
        context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(imports))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, sender, if_out_of_memory))
    resource_tracker.ensure_running()  # before SIGINT is blocked: starting the tracker unblocks it
    # Only this process handles Ctrl-C: the server and its forks ignore it from the start, even during their imports.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    sender.close()  # so that the pipe closes when the process ends
    try:
        while True:
            try:
                kind, content = receiver.recv()
            except (EOFError, OSError):  # the process died without an "ended" message, or while sending one
                process.join()
                return _how_it_ended(process.exitcode)
            if kind == "sent":
                receive(content)
            else:
                process.join(timeout=10)
                return content
    finally:
        process.kill()  # has no effect unless `receive` raised or Ctrl-C was pressed
        process.join()
        receiver.close()


def _run(work: Callable[[Send], None], connection: Connection, if_out_of_memory: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork server may have been started elsewhere, with SIGINT on
    try:
        work(lambda content: connection.send(("sent", content)))
        connection.send(("ended", ""))
    except BrokenPipeError:  # the parent is gone
        return
    except BaseException as error:  # the parent reports any error
        connection.send(("ended", one_line(error, if_out_of_memory)))


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        memory = ", as Linux does when memory runs out" if name == "SIGKILL" else ""
        return f"its process was killed by {name}{memory}"
    return f"its process ended with exit code {exit_code}"

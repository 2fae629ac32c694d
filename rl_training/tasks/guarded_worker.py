"""A process that looks at what a model wrote, at bounded cost, and runs nothing of it.

Checking arbitrary text is dangerous for two reasons.

It may be run: libraries that parse answers call `eval`. So the worker installs an audit hook, which cannot be taken out
again, that refuses to run code compiled from text.

It may not end: `9**9**9**9` is one power of big integers, and no signal handler runs before that returns. So texts are
looked at in a child of the worker, with limited memory, which the kernel ends when the time for a text is up. Another
is forked at once.

The worker finds modules where the trainer finds them, and imports what its `load` does, and neither torch nor TRL. It
reads and writes one line of JSON per question. None is started before the first question, none is left at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any, BinaryIO

from rl_training.errors import UserError

_START_SECONDS = 120  # importing takes a second, but a minute on a cold network drive
_MAX_WORKER_BYTES = 1 << 30
_MOST_WAITING = 5  # times the processor's time that a question may take by the clock
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rl_training.tasks.guarded_worker import serve; serve(*sys.argv[2:])"
)
# A pool of threads for each core would be counted as memory.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

Question = tuple[str | None, ...]


class GuardedWorker:
    """The process that checks, seen from the trainer's side: started when needed, ended by the kernel or by `close`.

    Args:
        module: of the function `load()`, which the worker calls once. It returns a function prepare(*question), and
            that the check of this question: a function without arguments that looks at the text and returns JSON. The
            check alone is timed.
        install: what to do where the worker cannot start.
    """

    def __init__(self, module: str, install: str) -> None:
        self._module = module
        self._install = install
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()  # a line belongs to the request before it
        atexit.register(self.close)

    @property
    def pid(self) -> int | None:
        """Return the process id while there is a process, otherwise None."""
        return None if self._process is None else self._process.pid

    def ask_all(
        self, questions: Iterable[Question], deadline_seconds: float, budget_seconds: float
    ) -> dict[Question, Any]:
        """Return the answer to each question; None where time or memory ran out.

        Equal questions are asked once. The first start of the worker is not charged to the budget, later ones are.

        Args:
            questions: what `prepare` is called with.
            deadline_seconds: the processor's time for one question.
            budget_seconds: the time for all, by the clock: the other ranks wait meanwhile.

        Raises:
            UserError: where the worker cannot start.
        """
        answers: dict[Question, Any] = dict.fromkeys(questions)
        if answers:
            self.start()
        end = time.monotonic() + budget_seconds
        for question in answers:
            seconds = min(deadline_seconds, end - time.monotonic())
            answers[question] = self.ask(question, seconds) if seconds > 0 else None
        return answers

    def ask(self, question: Question, seconds: float) -> Any:
        """Return the answer to one question, None when the time (`seconds` of the processor) or the memory ran out."""
        request = json.dumps({"question": question, "seconds": seconds}).encode() + b"\n"
        with self._lock:
            line = self._reply(self.start(), request)
            if line:
                return json.loads(line)["answer"]
            self.close()
            return None

    def start(self) -> subprocess.Popen[bytes]:
        """Return the process, alive. Raise UserError with the reason when it cannot start.

        A forked child starts its own: `poll` takes the parent's for dead.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return self._process
            self.close()
            # -P: no module of the working folder takes the place of another
            command = [sys.executable, "-P", "-c", _START, json.dumps(sys.path), self._module]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, bufsize=0, env={**os.environ, **_ONE_THREAD}
            )
            line = self._reply(self._process)
            failure = json.loads(line)["failure"] if line else f"it died or took over {_START_SECONDS} s"
            if failure is not None:
                self.close()
                raise UserError(f"The process that checks answers could not start ({failure}): {self._install}")
            return self._process

    def close(self) -> None:
        """Kill the process, if any, and wait for it, so that no zombie is left."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                with process:  # closes the pipes, and waits
                    process.kill()

    def _reply(self, process: subprocess.Popen[bytes], request: bytes = b"") -> bytes:
        """Return the next line of the process's output; empty when it has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            rest = memoryview(request)
            while rest:  # a signal may come when a part of it is written
                rest = rest[process.stdin.write(rest) :]
            return process.stdout.readline()
        except BrokenPipeError:
            return b""
        except BaseException:  # Ctrl-C: the reply, coming late, would be taken for the next one's
            self.close()
            raise


# What follows runs in the worker.

refused: list[str] = []  # what code made from text was not run, since the worker began


def refuse_code_from_text(event: str, args: tuple[object, ...]) -> None:
    """Raise RuntimeError when code that does not come from a module's file is about to run. An audit hook."""
    if event == "exec":
        (code,) = args
        assert isinstance(code, CodeType)
        # Modules come from files, or are `<frozen ...>`; eval, exec, lambdify and the like call their code `<string>`.
        if not os.path.isabs(code.co_filename) and not code.co_filename.startswith("<frozen "):
            refused.append(code.co_filename)
            raise RuntimeError("code made from text is not run here")


def serve(module: str) -> None:
    """Answer requests until stdin ends: the trainer is gone."""
    import resource  # POSIX only, and only the worker needs it

    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not be taken for a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    for ending in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(ending, signal.SIG_DFL)  # the kernel ends the process, even within one operation
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGPROF})  # whatever the trainer made of them
    signal.alarm(_START_SECONDS)

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere the limit is refused, and only the deadline bounds the memory
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_WORKER_BYTES, _MAX_WORKER_BYTES))
    try:
        prepare: Callable[..., Callable[[], Any]] = importlib.import_module(module).load()
    except ImportError as error:
        reply({"failure": str(error)})
        return
    sys.addaudithook(refuse_code_from_text)
    signal.alarm(0)
    reply({"failure": None})
    child = None
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            prepare(*json.loads(line)["question"])  # so that a new child need not
            child = child or _Child(prepare)
            answer = child.ask(line)
            if not answer:
                child = None
            reply({"answer": json.loads(answer or "null")})


class _Child:
    """The process that looks at the texts, seen from the worker's side."""

    def __init__(self, prepare: Callable[..., Callable[[], Any]]) -> None:
        from_worker, to_child = os.pipe()
        from_child, to_worker = os.pipe()
        gc.freeze()  # a collection in the child would copy all that it visits
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(to_child)
                os.close(from_child)
                for stream in (1, 2):  # what a library says of a text is no news for who trains
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
                _answer(prepare, os.fdopen(from_worker, "rb"), os.fdopen(to_worker, "wb"))
            finally:
                os._exit(1)
        os.close(from_worker)
        os.close(to_worker)
        self._requests = os.fdopen(to_child, "wb")
        self._answers = os.fdopen(from_child, "rb")

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request; empty, and the child is gone, where time or memory ran out."""
        self._requests.write(request)
        self._requests.flush()
        answer = self._answers.readline()
        if answer.endswith(b"\n"):
            return answer
        os.waitpid(self._pid, 0)
        self._answers.close()
        self._requests.close()
        return b""


def _answer(prepare: Callable[..., Callable[[], Any]], requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests in a child until the worker is gone, or until one is the end of the child."""
    for line in requests:
        request = json.loads(line)
        check = prepare(*request["question"])
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        signal.setitimer(signal.ITIMER_REAL, _MOST_WAITING * request["seconds"])
        answer = check()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

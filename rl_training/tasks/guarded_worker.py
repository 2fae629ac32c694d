"""A process that checks text written by a model, with bounded time and memory, and without running it.

Checking arbitrary text is dangerous for two reasons:

The text may be run as code: libraries that parse answers call `eval`. So the worker installs an audit hook, which
cannot be removed, that refuses to run code compiled from text.

The check may not terminate: `9**9**9**9` is a single power of big integers, and no signal handler runs until it
returns. So texts are checked in a child of the worker that has limited memory, and that the kernel kills when the time
for a text is up. The worker then forks another child.

The worker uses the trainer's module search path. It imports what its `load` imports, but neither torch nor TRL. It
reads and writes one line of JSON per question. It is started at the first question and ended at exit.
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

_START_SECONDS = 120  # imports take a second, but up to a minute from a cold network drive
_MAX_WORKER_BYTES = 1 << 30
_WALL_CLOCK_FACTOR = 5  # limit of wall-clock time for a question, in multiples of its CPU time limit
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rl_training.tasks.guarded_worker import serve; serve(*sys.argv[2:])"
)
# A thread pool with a thread per core would count towards the memory limit.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

Question = tuple[str | None, ...]


class GuardedWorker:
    """The worker process, seen from the trainer: started when needed, ended by the kernel or by `close`.

    Args:
        module: Module with a function `load()`, which the worker calls once. `load()` returns a function
            `prepare(*question)`, which in turn returns the check of this question: a function without arguments that
            inspects the text and returns a JSON value. Only the check is timed.
        install: What the user should do if the worker cannot start; part of the error message.
    """

    def __init__(self, module: str, install: str) -> None:
        self._module = module
        self._install = install
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()  # pairs each reply with the request before it
        atexit.register(self.close)

    @property
    def pid(self) -> int | None:
        """The process id, or None if there is no process."""
        return None if self._process is None else self._process.pid

    def ask_all(
        self, questions: Iterable[Question], deadline_seconds: float, budget_seconds: float
    ) -> dict[Question, Any]:
        """Return the answer to each question, or None if time or memory ran out.

        Equal questions are asked once. The first start of the worker does not count towards the budget; restarts do.

        Args:
            questions: Arguments of `prepare`, one tuple per question.
            deadline_seconds: CPU time for one question.
            budget_seconds: Wall-clock time for all questions. Other ranks wait meanwhile.

        Raises:
            UserError: If the worker cannot start.
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
        """Return the answer to one question, or None if its CPU time (`seconds`) or memory ran out."""
        request = json.dumps({"question": question, "seconds": seconds}).encode() + b"\n"
        with self._lock:
            line = self._reply(self.start(), request)
            if line:
                return json.loads(line)["answer"]
            self.close()
            return None

    def start(self) -> subprocess.Popen[bytes]:
        """Return the running worker process, and start it if necessary. Raise UserError if it cannot start.

        A fork of the trainer starts its own worker, because `poll` reports the parent's as dead.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return self._process
            self.close()
            # -P keeps modules in the working folder from shadowing others
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
        """Kill the process, if there is one, and wait for it, so that no zombie is left."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                with process:  # closes the pipes, and waits
                    process.kill()

    def _reply(self, process: subprocess.Popen[bytes], request: bytes = b"") -> bytes:
        """Send a request and return the next line of the process's output, or b"" if the process has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            rest = memoryview(request)
            while rest:  # a signal can interrupt a write halfway
                rest = rest[process.stdin.write(rest) :]
            return process.stdout.readline()
        except BrokenPipeError:
            return b""
        except BaseException:  # after Ctrl-C, the late reply would be taken for that of the next request
            self.close()
            raise


# Everything below runs in the worker.

refused: list[str] = []  # file names of the code objects that were refused since the worker started


def refuse_code_from_text(event: str, args: tuple[object, ...]) -> None:
    """Audit hook: raise RuntimeError if code that does not come from a module's file is about to run."""
    if event == "exec":
        (code,) = args
        assert isinstance(code, CodeType)
        # Modules come from files or are `<frozen ...>`; code of eval, exec or lambdify is named `<string>` or similar.
        if not os.path.isabs(code.co_filename) and not code.co_filename.startswith("<frozen "):
            refused.append(code.co_filename)
            raise RuntimeError("code made from text is not run here")


def serve(module: str) -> None:
    """Answer requests until stdin ends, which means that the trainer has ended."""
    import resource  # POSIX only, and only the worker needs it

    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of libraries must not be taken for a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    for ending in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(ending, signal.SIG_DFL)  # the kernel ends the process, even in the middle of an operation
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGPROF})  # the trainer may have blocked them
    signal.alarm(_START_SECONDS)

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # other systems refuse the limit, so only the deadline bounds the memory
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
            prepare(*json.loads(line)["question"])  # done here too, so that a new child inherits the cached result
            child = child or _Child(prepare)
            answer = child.ask(line)
            if not answer:
                child = None
            reply({"answer": json.loads(answer or "null")})


class _Child:
    """The process that checks the texts, seen from the worker."""

    def __init__(self, prepare: Callable[..., Callable[[], Any]]) -> None:
        from_worker, to_child = os.pipe()
        from_child, to_worker = os.pipe()
        gc.freeze()  # garbage collection in the child would copy every page it visits
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(to_child)
                os.close(from_child)
                for stream in (1, 2):  # hide what libraries print about texts
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
                _answer(prepare, os.fdopen(from_worker, "rb"), os.fdopen(to_worker, "wb"))
            finally:
                os._exit(1)
        os.close(from_worker)
        os.close(to_worker)
        self._requests = os.fdopen(to_child, "wb")
        self._answers = os.fdopen(from_child, "rb")

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request. If time or memory ran out, the child has ended, and the answer is b""."""
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
    """Answer requests in the child until the worker ends, or until a request kills the child."""
    for line in requests:
        request = json.loads(line)
        check = prepare(*request["question"])
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        signal.setitimer(signal.ITIMER_REAL, _WALL_CLOCK_FACTOR * request["seconds"])
        answer = check()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

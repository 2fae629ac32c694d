r"""A guard around math_verify: checks at bounded cost whether text that a model wrote equals a number.

A model writes arbitrary text, and passing that to computer algebra is dangerous for two reasons.

It may be run. Of math_verify's two readers, `ExprExtractionConfig` ends in sympy's `parse_expr`, which is Python's
`eval`: never used here. The LaTeX grammar (latex2sympy2_extended) calls `sympy.Number(text)` for every numeral, which
is `eval` again. So the worker tells sympy, through `sympify`'s own table of converters, to read a string as a numeral
or not at all, and installs an audit hook, which cannot be taken out again, that refuses to run code compiled from text.
(`simplify` writes code for polynomials in several unknowns: refused as well, so `\log_{2}{8}` is not seen to be 3.)

It may not end. `9^{9^{9^9}}` is one power of big integers, and no signal handler runs before that returns. So the
check lives in another process with limited memory, which asks the kernel to kill it when the time for an answer is up;
the next one is started in about a second. This very file, run as a script, is that process; it reads and writes one
line of JSON per check and imports neither torch nor TRL. One for each rank, none before the first check, none left at
exit.

Example: `are_equal([(r"\frac{36}{2}", Fraction(18)), ("9^{9^{9^9}}", Fraction(18))])` is `[True, False]`.
"""

import atexit
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import CodeType

logger = logging.getLogger(__name__)

MAX_CHARS = 200  # no number needs more; the time to parse grows faster than the length
DEADLINE_SECONDS = 2.0  # for one answer
BUDGET_SECONDS = 10.0  # for all the answers of one call: the other ranks wait meanwhile
_START_SECONDS = 120  # importing sympy takes a second, but a minute on a cold network drive
_MAX_WORKER_BYTES = 1 << 30  # sympy with the grammar needs 70 MB
INSTALL = f"pip install math-verify, for {sys.executable}"
_NUMERAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_LATEX_TEXT_OR_COMMAND = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_PROSE = re.compile(r"[A-Za-z]{3,}[\s,.:;]+[A-Za-z]{2,}")
# The grammar takes `9 9`, `9 (9)` and `8\,10` for the mixed number 18, and `18_000` for 18.
_MISREAD = re.compile(r"[0-9](?:\s|~|\\[,;:! ])+[0-9]|[0-9)]\s*\(\s*[-+]?[0-9.]+\s*\)|[0-9]_")


def is_worth_asking(answer: str) -> bool:
    """Whether the text may be an expression of a number: short, not prose, with a digit or a LaTeX command.

    Parsing an ordinary sentence costs more than all the arithmetic of a batch, and its outcome is known.
    """
    if len(answer) > MAX_CHARS or not re.search(r"[0-9\\]", answer) or _MISREAD.search(answer):
        return False
    return not _PROSE.search(_LATEX_TEXT_OR_COMMAND.sub(" ", answer))


def are_equal(
    pairs: Sequence[tuple[str, Fraction]],
    deadline_seconds: float = DEADLINE_SECONDS,
    budget_seconds: float = BUDGET_SECONDS,
) -> list[bool]:
    """For each (answer, number): whether math_verify finds them equal, within the deadline and the budget.

    Equal pairs are checked once. What is not decided in time counts as not equal, and one warning says how
    many those were. The first start of the worker is not charged to the budget, later ones are. Raises
    RuntimeError when the worker cannot start.
    """
    distinct = dict.fromkeys(pair for pair in pairs if is_worth_asking(pair[0]))
    if distinct:
        _worker.start()
    end = time.monotonic() + budget_seconds
    verdicts: dict[tuple[str, Fraction], bool | None] = {}  # None: not decided in time
    for answer, number in distinct:
        seconds = min(deadline_seconds, end - time.monotonic())
        verdicts[answer, number] = _worker.check(answer, number, seconds) if seconds > 0 else None
    undecided = sum(verdicts.get(pair, False) is None for pair in pairs)
    if undecided:
        logger.warning(
            f"{undecided} of {len(pairs)} answers count as wrong: math_verify did not decide in time "
            f"({deadline_seconds:g} s each, {budget_seconds:g} s in all)."
        )
    return [verdicts.get(pair) is True for pair in pairs]


class MathWorker:
    """The process that checks, seen from the trainer's side: started when needed, ended by the kernel or by `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()  # a line belongs to the request before it

    @property
    def pid(self) -> int | None:
        """The process id while there is a process, otherwise None."""
        return None if self._process is None else self._process.pid

    def start(self) -> subprocess.Popen[bytes]:
        """Returns the process, alive; raises RuntimeError with the reason when it cannot start.

        A forked child starts its own: `poll` takes the parent's for dead.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return self._process
            self.close()
            command, pipe = [sys.executable, __file__], subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0)
            line = self._reply(self._process)
            failure = json.loads(line)["failure"] if line else f"it died or took over {_START_SECONDS} s"
            if failure is not None:
                self.close()
                raise RuntimeError(f"The process that checks answers could not start ({failure}): {INSTALL}")
            return self._process

    def check(self, answer: str, number: Fraction, seconds: float) -> bool | None:
        """Whether answer and number are equal; None when the time (`seconds`) or the memory for it ran out."""
        request = json.dumps({"answer": answer, "number": str(number), "seconds": seconds}).encode() + b"\n"
        with self._lock:
            line = self._reply(self.start(), request)
            if line:
                return json.loads(line)["equal"]
            self.close()
            return None

    def _reply(self, process: subprocess.Popen[bytes], request: bytes = b"") -> bytes:
        """Returns the next line of the process's output; empty when it has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            return process.stdout.readline()
        except BrokenPipeError:
            return b""
        except BaseException:  # Ctrl-C: the reply, coming late, would be taken for the next one's
            self.close()
            raise

    def close(self) -> None:
        """Kills the process, if any, and waits for it, so that no zombie is left."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                with process:  # closes the pipes, and waits
                    process.kill()


# What follows runs in the worker.


def load_check() -> Callable[[str, str], bool]:
    """math_verify as a function (answer, number) -> equal; from then on this process runs no code from text.

    For a process of its own: the audit hook cannot be removed, and sympy reads strings as numerals only.
    """
    import sympy.physics.units  # noqa: F401  simplify imports it, and it sympifies names
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from math_verify import verify
    from sympy import Basic, Rational
    from sympy.core.sympify import SympifyError, converter

    normalization = NormalizationConfig(units=True, malformed_operators=True, nits=True)

    def check(answer: str, number: str) -> bool:
        latex = re.sub(r"\\[()\[\]]", " ", answer)  # the delimiters of a formula
        expression = latex2sympy(latex, is_real=True, normalization_config=normalization)
        # A derivative comes back as a list, of which verify would take any one element.
        if not isinstance(expression, Basic):
            return False
        return bool(verify(Rational(number), expression, timeout_seconds=None, raise_on_error=True))

    def numeral(text: str) -> Basic:
        if not _NUMERAL.fullmatch(text):
            raise SympifyError(f"not a numeral: {text!r}")
        value = Fraction(text)
        return Rational(value.numerator, value.denominator)

    for answer in (r"\frac{36}{2}", r"\sqrt{9}", "x = y + 1"):  # so that sympy's own late imports are done
        check(answer, "18")
    converter[str] = numeral
    sys.addaudithook(_refuse_code_from_text)
    return check


def _refuse_code_from_text(event: str, args: tuple[object, ...]) -> None:
    """Raises RuntimeError when code that does not come from a module's file is about to run."""
    if event == "exec":
        (code,) = args
        assert isinstance(code, CodeType)
        # eval and exec of a string, lambdify and the like call their code `<...>`; modules `<frozen ...>`.
        if code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen "):
            raise RuntimeError("code made from text is not run here")


def _serve() -> None:
    """Answers requests until stdin ends, when the trainer is gone, or until an answer is the end of this process."""
    import resource  # POSIX only, and only the worker needs it

    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not be taken for a reply
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]  # our names shadow no module
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends this process, even within one operation
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})  # whatever the trainer made of it
    signal.alarm(_START_SECONDS)
    logging.disable()  # math_verify warns that it has no timeout of its own; it has this process's

    def reply(message: Mapping[str, str | bool | None]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere the limit is refused, and only the deadline bounds the memory
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_WORKER_BYTES, _MAX_WORKER_BYTES))
    try:
        check = load_check()
    except ImportError as error:
        reply({"failure": str(error)})
        return
    signal.alarm(0)
    reply({"failure": None})
    with contextlib.suppress(BrokenPipeError, MemoryError):  # the trainer is gone; what is left is not to be trusted
        for line in sys.stdin:
            request = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, request["seconds"])
            equal = _is_equal(check, request["answer"], request["number"])
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            reply({"equal": equal})


def _is_equal(check: Callable[[str, str], bool], answer: str, number: str) -> bool:
    try:
        return check(answer, number)
    except MemoryError:
        raise
    except Exception:  # arbitrary text: the grammar raises bare Exception, sympy anything
        return False


_worker = MathWorker()

if __name__ == "__main__":
    _serve()
else:
    atexit.register(_worker.close)

"""How a command ends: successfully, or with one line that says what is wrong and how to fix it.

    exit code 2          a UserError: one line
    exit code 1          any other error: its traceback, then one line
    exit code 130, 143   ended by SIGINT (Ctrl-C) or SIGTERM

--debug, or RL_TRAINING_DEBUG=1, shows the traceback of a UserError too. Under torchrun or accelerate launch, each
process hands its line to the launcher, which prints the line of the first process that failed; the main process also
prints its own. Secrets from the command line and the environment are masked. To keep --help immediate, this module
imports nothing slow and no library of an extra, not even Hydra.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

import rl_training.job.silence  # noqa: F401

from rl_training.errors import UserError, require_extra
from rl_training.records.files.masking import mask_line, secrets_in
from rl_training.records.files.printable import printable

PACKAGE = Path(__file__).parents[1]
DEBUG_VARIABLE = "RL_TRAINING_DEBUG"
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # names the file from which the launcher reads this process's error
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Error types that indicate a bug. With other types, a library refuses a value, a file or the machine.
CODE_MISTAKES = (TypeError, AttributeError, NameError, LookupError, AssertionError, ArithmeticError)


class Interrupted(BaseException):
    """Raised when a signal asks the command to end."""

    def __init__(self, signum: int, line: str = "") -> None:
        super().__init__(line or f"ended by {signal.Signals(signum).name}")
        self.signum = signum


def run_command(main: Callable[[], object]) -> None:
    """Run `main`, a command that reads its arguments from sys.argv; on an error, exit as the module docstring says.

    SIGINT and SIGTERM raise Interrupted at any point in `main`, which may install other handlers temporarily.
    """
    debug = "--debug" in sys.argv[1:] or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != "--debug"]
    secrets = secrets_in(sys.argv[1:], os.environ)
    for signum in SIGNALS:
        signal.signal(signum, _interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal's encoding may lack letters such as δ
    try:
        with require_extra():
            main()
    except (Interrupted, KeyboardInterrupt) as error:  # KeyboardInterrupt comes from libraries' own handlers
        stop = error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT)
        _exit(secrets, 128 + stop.signum, "" if _rank() else str(stop))
    except BrokenPipeError:
        if _is_read(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would write the rest when it ends
        sys.exit(128 + signal.SIGPIPE)  # as in `command | head`, whose reader has gone: nothing to say
    except UserError as error:
        trace = "".join(traceback.format_exception(error)) if debug else ""
        _exit(secrets, 2, f"error: {format_error(error)}", trace)
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        _exit(secrets, 1, f"error: {format_error(error)} (unexpected: the traceback is above)", trace)


def _is_read(stream: TextIO) -> bool:
    """Return whether a stream still has a reader, as it always has unless it is a pipe."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def format_error(error: BaseException) -> str:
    """Return an error's message and notes on one line, preceded by its type unless it is a UserError."""
    message = "; ".join(" ".join(part.split()) for part in (str(error), *getattr(error, "__notes__", ())))
    is_plain = isinstance(error, UserError) and message
    return message if is_plain else f"{type(error).__name__}: {message}".removesuffix(": ")


def is_refusal(error: BaseException) -> bool:
    """Return whether a library raised this error to refuse its input, rather than because of a bug."""
    frames = traceback.extract_tb(error.__traceback__)
    is_raised_here = bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE)
    return not is_raised_here and not isinstance(error, CODE_MISTAKES)


@contextlib.contextmanager
def as_user_errors(unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn a library's refusal into a UserError. Use it before the first step, while only settings can be the cause.

    Args:
        unless: Called when an error occurs; True means that settings can no longer be the cause, so the error is
            raised unchanged.

    Raises:
        UserError: For an error that `is_refusal` accepts. Any other error is raised unchanged.
    """
    try:
        with require_extra():
            yield
    except UserError:
        raise
    except Exception as error:
        if not is_refusal(error) or unless():
            raise
        raise UserError(f"{format_error(error)} (--debug shows where)") from error


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(signum)


def _exit(secrets: Sequence[str], code: int, line: str, trace: str = "") -> NoReturn:
    """Print `trace` and then `line`, both with `secrets` masked, and exit with `code`."""
    line, trace = (printable(mask_line(text, secrets)) for text in (line, trace))
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL)  # a second signal ends the process at once
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if line and path:
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    sys.stdout.flush()
    print(trace, end="", file=sys.stderr, flush=True)
    if line and not (path and _rank()):  # otherwise the launcher prints it
        print(line, file=sys.stderr, flush=True)
    sys.exit(code)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))

"""How a command ends: well, or with one line that says what was wrong and what to do about it.

    exit code 2          the user's mistake, a UserError, or the library of an extra that is missing: one line
    exit code 1          any other error: the traceback, then one line
    exit code 130, 143   ended by SIGINT (Ctrl-C) or SIGTERM

--debug, or RL_TRAINING_DEBUG=1, shows the traceback of the user's mistakes too. Each process that torchrun or
accelerate launch has started hands its line to the launcher, which prints that of the first to fail; beside it the main
process prints its own. Secrets that were typed or lie in the environment are masked. The module imports nothing slow
and no library of an extra, not even Hydra, so that --help is immediate.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import rl_training.job.silence  # noqa: F401

from rl_training.errors import UserError
from rl_training.extras import what_is_missing
from rl_training.records.masking import mask_line, secrets_in
from rl_training.records.printable import printable
from rl_training.shadowing import what_shadows

PACKAGE = Path(__file__).parents[1]
DEBUG_VARIABLE = "RL_TRAINING_DEBUG"
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # where a launcher looks for the error of a process that it started
# What accelerate launch and torchrun set for the processes that they start.
LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Raised when a signal asks the command to end."""

    def __init__(self, signum: int, line: str = "") -> None:
        super().__init__(line or f"ended by {signal.Signals(signum).name}")
        self.signum = signum


def run_command(main: Callable[[], object]) -> None:
    """Runs `main`, a command whose arguments are sys.argv, and ends the process as the module's head says.

    SIGINT and SIGTERM raise Interrupted wherever `main` is; it may install other handlers for a while.
    """
    debug = "--debug" in sys.argv[1:] or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != "--debug"]
    secrets = secrets_in(sys.argv[1:], os.environ)
    for signum in SIGNALS:
        signal.signal(signum, _interrupt)
    try:
        main()
    except (Interrupted, KeyboardInterrupt) as error:  # the latter of a library's own handler
        stop = error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT)
        _end(secrets, 128 + stop.signum, "" if _rank() else str(stop))
    except Exception as error:
        foreseen = is_the_users(error)
        shown = "" if foreseen and not debug else "".join(traceback.format_exception(error))
        hint = "" if foreseen else " (unexpected: the traceback is above)"
        _end(secrets, 2 if foreseen else 1, f"error: {in_one_line(error)}{hint}", shown)


def is_the_users(error: BaseException) -> bool:
    """Returns whether an error is the user's mistake, a missing extra's, or that of a file in a package's place."""
    return isinstance(error, UserError) or bool(what_is_missing(error) or what_shadows(error))


def is_the_programs(error: BaseException) -> bool:
    """Returns whether an error was raised in the package itself, and is not the user's: a mistake of the package."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE) and not is_the_users(error)


def in_one_line(error: BaseException) -> str:
    """Returns the message of an error and its notes, without line breaks; of any but the user's, its type in front."""
    text = what_is_missing(error) or what_shadows(error) or str(error)
    message = "; ".join(" ".join(part.split()) for part in (text, *getattr(error, "__notes__", ())))
    return message if is_the_users(error) and message else f"{type(error).__name__}: {message}".removesuffix(": ")


@contextlib.contextmanager
def libraries_refuse(unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """A context that turns an error that a library raises into a UserError, unless `unless()` holds by then.

    For use before the first step: nothing runs yet, so the settings are at fault. What the package itself raises stays.
    """
    try:
        yield
    except Exception as error:
        if is_the_users(error) or is_the_programs(error) or unless():
            raise
        raise UserError(f"{in_one_line(error)} (--debug shows where)") from error


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(signum)


def _end(secrets: Sequence[str], code: int, line: str, shown: str = "") -> NoReturn:
    """Ends the process with a line, below what else is shown; `secrets` are masked in both."""
    line, shown = (printable(mask_line(text, secrets)) for text in (line, shown))
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL)  # a second one ends it at once
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if line and path:
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    sys.stdout.flush()
    print(shown, end="", file=sys.stderr, flush=True)
    if line and not (path and _rank()):  # else the launcher prints it
        print(line, file=sys.stderr, flush=True)
    sys.exit(code)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))

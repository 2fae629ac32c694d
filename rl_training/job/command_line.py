"""How a command was started, and how it ends: well, or with one line that says what was wrong and what to do about it.

    exit code 2          an error that was foreseen, in what the user asked for or has installed: one line
    exit code 1          any other: the traceback, then one line
    exit code 130, 143   ended by SIGINT (Ctrl-C) or SIGTERM

--debug, or RL_TRAINING_DEBUG=1, shows the traceback of a foreseen error too. Of several processes one prints. Secrets
that were typed or lie in the environment are masked. The module imports nothing slow and no library of an extra, not
even Hydra, so that --help is immediate.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import rl_training.job.silence  # noqa: F401

from rl_training.extras import what_is_missing
from rl_training.records.masking import mask_line, secrets_in

PACKAGE = Path(__file__).parents[1]
DEBUG_VARIABLE = "RL_TRAINING_DEBUG"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SECONDS_TO_BE_ENDED = 3.0  # within which a launcher ends the other processes of one that has failed
# What accelerate launch and torchrun set for the processes that they start.
LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
PATIENCE = 60  # seconds for which a line waits for the launcher to end
# It ignores Ctrl-C and the launcher's signals: it still has a line to print.
SAY_AFTER = 'trap "" INT TERM; n=0; while kill -0 $1 && [ $n -lt $2 ]; do sleep 0.1; n=$((n + 1)); done; echo "$3"'


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    launcher  its process; None for a shell, which may end before this process does
    typed     the command line up to its first setting: python or the launcher with its arguments, and the script, the
              module, or rl-training and its command
    """

    launcher: int | None
    typed: str

    @classmethod
    def of_this_process(cls) -> Launch:
        """Returns how this process was started; call it while the launcher lives, which Ctrl-C may end first."""
        if not any(name in os.environ for name in LAUNCHED):
            return cls(None, _typed(sys.orig_argv) or shlex.join(("python", sys.argv[0])))
        launcher = os.getppid()
        try:
            said = Path(f"/proc/{launcher}/cmdline").read_text(encoding="utf-8").split("\0")
        except (OSError, UnicodeDecodeError):  # not Linux
            said = []
        return cls(launcher, _typed(said) or f"accelerate launch … {shlex.quote(sys.argv[0])}")

    def say_last(self, line: str) -> None:
        """Prints the line on stderr, on a terminal below what the launcher has to say of how its processes ended."""
        if self.launcher is None or self.launcher != os.getppid() or not sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)
            return
        arguments = ["sh", "-c", SAY_AFTER, "sh", str(self.launcher), str(10 * PATIENCE), line]
        subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=subprocess.DEVNULL)


def _typed(words: Sequence[str]) -> str:
    """Returns the words up to this process's script or command as they were typed, "" where neither is among them."""
    for number, word in enumerate(words, 1):
        is_program = Path(word).name in ("rl-training", "rl_training")  # the command's name follows
        if is_program or word == sys.argv[0]:
            typed = list(words[: number + is_program])
            break
    else:
        return ""
    if len(typed) > 1 and not typed[1].startswith("-") and not typed[1].endswith(".py"):
        name = Path(typed[1]).name  # python stands before a program that was called by its name
        typed = [name if shutil.which(name) == typed[1] else typed[1], *typed[2:]]
    return shlex.join(typed)


class Interrupted(BaseException):
    """Raised when a signal asks the command to end."""

    def __init__(self, signum: int, line: str = "") -> None:
        super().__init__(line or f"ended by {signal.Signals(signum).name}")
        self.signum = signum


class Carried(BaseException):
    """Carries an error through Hydra, which prints its own line about every Exception in every process."""


def run_command(main: Callable[[], object]) -> None:
    """Runs `main`, a command whose arguments are sys.argv, and ends the process as the module's head says.

    Foreseen errors are those of Hydra and OmegaConf, put in plain words, and the package's own ValueError, OSError and
    ImportError. SIGINT and SIGTERM raise Interrupted wherever `main` is; it may install other handlers for a while.
    """
    debug = "--debug" in sys.argv[1:] or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != "--debug"]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on, instead of printing them
    end = functools.partial(_end, Launch.of_this_process(), secrets_in(sys.argv[1:], os.environ))
    for signum in SIGNALS:
        signal.signal(signum, _interrupt)
    try:
        main()
    except (Interrupted, KeyboardInterrupt) as error:  # the latter of a library's own handler
        stop = error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT)
        end(128 + stop.signum, "" if _rank() else str(stop))
    except Carried as carried:
        end(*_failure(carried.args[0], debug))
    except Exception as error:
        end(*_failure(error, debug))


def is_foreseen(error: BaseException) -> bool:
    """Returns whether an error is foreseen: raised by the package for the user, by Hydra, or by a missing extra."""
    is_ours = bool(what_is_missing(error)) or _raised_in(PACKAGE, error)
    return _is_of_hydra(error) or (is_ours and isinstance(error, ValueError | OSError | ImportError))


def _is_of_hydra(error: BaseException) -> bool:
    """Returns whether Hydra or OmegaConf raised it; some of Hydra's errors are plain ValueErrors."""
    if {kind.__module__.partition(".")[0] for kind in type(error).__mro__} & {"hydra", "omegaconf"}:
        return True
    hydra = sys.modules.get("hydra")
    at_home = hydra is not None and _raised_in(Path(str(hydra.__file__)).parent, error)
    return at_home and isinstance(error, ValueError | OSError | ImportError)


def _raised_in(folder: Path, error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(folder)


def in_one_line(error: BaseException) -> str:
    """Returns the message of an error without line breaks; an unforeseen one has its type in front."""
    text = what_is_missing(error) or str(error)
    if _is_of_hydra(error):
        from rl_training.job.explain import explain  # imports Hydra, which is there

        text = explain(error)
    message = "; ".join(" ".join(part.split()) for part in (text, *getattr(error, "__notes__", ())))
    return message if is_foreseen(error) and message else f"{type(error).__name__}: {message}".removesuffix(": ")


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A context for slow imports, which --help does not wait for: with garbage collection off, an eighth less time.

    Later collections skip the imported objects: they live as long as the process. transformers, which would print that
    W&B is offline, used or not, is not told so meanwhile.
    """
    gc.disable()
    mode = os.environ.pop("WANDB_MODE", None)
    try:
        yield
    finally:
        if mode is not None:
            os.environ["WANDB_MODE"] = mode
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def libraries_refuse(unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """A context that turns any library error into a ValueError, hence foreseen, unless `unless()` holds by then.

    For use before the first step: nothing runs yet, so the settings are at fault.
    """
    try:
        yield
    except Exception as error:
        if is_foreseen(error) or unless():
            raise
        raise ValueError(f"{in_one_line(error)} (--debug shows where)") from error


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(signum)


def _failure(error: Exception, debug: bool) -> tuple[int, str, str]:
    """Return the exit code of an error, the line that says it, and what is shown above that line."""
    foreseen = is_foreseen(error)
    shown = "" if foreseen and not debug else "".join(traceback.format_exception(error))
    hint = "" if foreseen else " (unexpected: the traceback is above)"
    return 2 if foreseen else 1, f"error: {in_one_line(error)}{hint}", shown


def _end(launch: Launch, secrets: Sequence[str], code: int, line: str, shown: str = "") -> NoReturn:
    """Ends the process; of several processes that end together, only the first says why, unless it does not end.

    secrets  values that are masked in what is printed
    """
    line, shown = mask_line(line, secrets), mask_line(shown, secrets)
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL)  # a second one ends it at once
    if line:
        time.sleep(SECONDS_TO_BE_ENDED * ((_rank() > 0) + (int(os.environ.get("LOCAL_RANK", "0")) > 0)))
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun prints it at the end of its table of failures
            message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
        sys.stdout.flush()
        print(shown, end="", file=sys.stderr, flush=True)
        launch.say_last(line)
    sys.exit(code)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))

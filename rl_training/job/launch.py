"""How this process was started: by a shell, accelerate launch or torchrun, and with which command line."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
        launched = any(name in os.environ for name in LAUNCHED)
        if not launched:
            words = _without_interpreter(_before_the_settings(sys.orig_argv))
            return cls(None, shlex.join(words or ("python", sys.argv[0])))
        launcher = os.getppid()
        try:
            said = Path(f"/proc/{launcher}/cmdline").read_text(encoding="utf-8").split("\0")
        except (OSError, UnicodeDecodeError):  # not Linux
            said = []
        words = _without_interpreter(_before_the_settings(said))
        return cls(launcher, shlex.join(words) or f"accelerate launch … {shlex.quote(sys.argv[0])}")

    def say_last(self, line: str) -> None:
        """Prints the line on stderr, on a terminal below what the launcher has to say of how its processes ended."""
        if self.launcher is None or self.launcher != os.getppid() or not sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)
            return
        arguments = ["sh", "-c", SAY_AFTER, "sh", str(self.launcher), str(10 * PATIENCE), line]
        subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=subprocess.DEVNULL)


def _before_the_settings(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the words up to this process's script or module, () where neither is among them."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # of python -m
    for number, word in enumerate(words, 1):
        if Path(word).name in ("rl-training", "rl_training"):  # its command comes behind it
            return tuple(words[: number + 1])
        if word == sys.argv[0] or (spec is not None and word == spec.name):
            return tuple(words[:number])
    return ()


def _without_interpreter(words: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the words as they were typed: python stands before a program that was called by its name."""
    if len(words) < 2 or words[1].startswith("-") or words[1].endswith(".py"):
        return words
    name = Path(words[1]).name
    return (name if shutil.which(name) == words[1] else words[1], *words[2:])

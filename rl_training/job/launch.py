"""Who has started this process: a shell, or accelerate launch or torchrun, and in which words."""

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
# Ctrl-C and what a launcher sends are not for it: it has a line to print.
SAY_AFTER = 'trap "" INT TERM; n=0; while kill -0 $1 && [ $n -lt $2 ]; do sleep 0.1; n=$((n + 1)); done; echo "$3"'


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    launcher  its process, None where a shell has started this one, which may well go before it
    typed     what stood before the script on the command line: python, or the launcher and its arguments
    """

    launcher: int | None
    typed: str

    @classmethod
    def of_this_process(cls) -> Launch:
        """Returns it; to be asked while the launcher is there, which a Ctrl-C may end first."""
        launched = any(name in os.environ for name in LAUNCHED)
        if not launched:
            return cls(None, shlex.join(_before_the_script(sys.orig_argv)) or "python")
        launcher = os.getppid()
        try:
            said = Path(f"/proc/{launcher}/cmdline").read_text(encoding="utf-8").split("\0")
        except (OSError, UnicodeDecodeError):  # not Linux
            said = []
        words = _without_interpreter(_before_the_script(said))
        return cls(launcher, shlex.join(words) or "accelerate launch …")

    def say_last(self, line: str) -> None:
        """Prints the line on stderr, on a terminal below what the launcher has to say of how its processes ended."""
        if self.launcher is None or self.launcher != os.getppid() or not sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)
            return
        arguments = ["sh", "-c", SAY_AFTER, "sh", str(self.launcher), str(10 * PATIENCE), line]
        subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=subprocess.DEVNULL)


def _before_the_script(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the words before this process's script, () where it is not among them."""
    script = sys.argv[0]
    return tuple(words[: list(words).index(script)]) if script in words else ()


def _without_interpreter(words: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a launcher's words as they are typed: python stands before a script that is called by its name."""
    if len(words) < 2 or words[1].startswith("-"):
        return words
    name = Path(words[1]).name
    return (name if shutil.which(name) == words[1] else words[1], *words[2:])

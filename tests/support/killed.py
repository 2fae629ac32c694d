"""Runs a program of the repository until something ends it.

Usage: `python tests/support/killed.py HOW PROGRAM …`, where HOW is one of these:

    open:END, rename:END    SIGKILL when a path with this ending is about to be opened, or to become a rename's target
    said:WORDS              SIGKILL when these words are printed to stderr
    memory:MEGABYTES        limit its memory to this much more than it has now

This needs no knowledge of the program: Python reports files through audit hooks.
"""

from __future__ import annotations

import os
import resource
import runpy
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

PATHS = {"open": ("open", 0), "rename": ("os.rename", 1)}  # name of the audit event, and which argument is the path


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Listening:
    """stderr that kills the process when certain words are written."""

    def __init__(self, stream: TextIO, words: str) -> None:
        self._stream, self._words = stream, words

    def write(self, text: str) -> int:
        if self._words in text:
            die()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def end_at(how: str) -> None:
    kind, _, what = how.partition(":")
    if kind == "said":
        sys.stderr = Listening(sys.stderr, what)  # type: ignore[assignment]
    elif kind == "memory":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + int(what) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    else:
        name, number = PATHS[kind]

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event == name and str(arguments[number]).endswith(what):
                die()

        sys.addaudithook(audit)


if __name__ == "__main__":
    end_at(sys.argv[1])
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")

"""Runs a program of the repository until something ends it: python tests/support/killed.py HOW PROGRAM …

    open:END, rename:END    SIGKILL, when a file whose path ends so is about to be opened, or to be moved to
    said:WORDS              SIGKILL, when these are printed to stderr
    memory:MEGABYTES        it gets no more memory than it has now, and so much

Of the program nothing is known here: files are what Python tells its auditors.
"""

from __future__ import annotations

import os
import resource
import runpy
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

PATHS = {"open": ("open", 0), "rename": ("os.rename", 1)}  # the auditors' name of it, and which argument is the path


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Listening:
    """stderr, that dies when certain words are said."""

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

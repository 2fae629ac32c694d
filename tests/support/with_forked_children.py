"""Runs a program of the repository whose child processes are forks, so they need no imports.

Usage: `python tests/support/with_forked_children.py PROGRAM …`.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys

if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda kind: fork  # type: ignore[assignment]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

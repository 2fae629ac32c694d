"""Errors of a function that the user has written: in one line that names it, with the place that failed."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def naming(what: str, hint: Callable[[], str] = str) -> Iterator[None]:
    """A context for a call: whatever fails in it, sys.exit() too, is a ValueError that begins with `what`.

    hint  what may help, added to the error's line

    Example: with what "reward function f": "reward function f failed: ZeroDivisionError: division by zero (f.py:2)".
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{what} failed: {said} ({frame.filename}:{frame.lineno}){hint()}") from error

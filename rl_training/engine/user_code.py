"""Errors of a function that the user has written: told apart from the package's own, with the place that failed."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator

from rl_training.errors import UserError


@contextlib.contextmanager
def wrap_user_errors(what: str) -> Iterator[None]:
    """A context for a call: whatever fails in it, sys.exit() too, is a ValueError that begins with `what`.

    Example: with what "intervention f": "intervention f failed: ZeroDivisionError: division by zero (f.py:2)".
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{what} failed: {said} ({_place_of(error)})") from error


@contextlib.contextmanager
def noting(what: str, hint: Callable[[], str] = str) -> Iterator[None]:
    """A context for a call: an error in it stays what it is, for who catches it, with a note that begins with `what`.

    hint  what may help, added to the note

    Example: with what "reward function f", the note of an error is "reward function f failed (f.py:2)".
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"{what} failed ({_place_of(error)}){hint()}")
        raise


def _place_of(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"

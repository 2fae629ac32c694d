"""The one error meant for the user: commands print only its message, but the traceback of any other error.

Errors in functions that the user wrote are told apart from the package's own, with file and line.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator

MEMORY_FULL = ("allocate memory", "not enough memory", "out of memory")  # messages on Linux, Windows and devices


class UserError(ValueError):
    """What the user asked for cannot be done, because of a setting, a file, the machine or the user's own code.

    The message names the cause and the fix, in one line. Any other exception is a bug in the program.
    """


@contextlib.contextmanager
def wrap_user_errors(what: str) -> Iterator[None]:
    """Turn any failure inside the context, even sys.exit(), into a UserError that begins with `what`.

    Example: with what "intervention f": "intervention f failed: ZeroDivisionError: division by zero (f.py:2)".
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{what} failed: {message} ({_location(error)})") from error


@contextlib.contextmanager
def add_note_on_error(what: str, hint: Callable[[], str] = str) -> Iterator[None]:
    """Add a note to any error raised inside the context. Its type stays the same for callers that catch it.

    Args:
        what: The beginning of the note. "reward function f" gives "reward function f failed (f.py:2)".
        hint: Returns advice that is appended to the note.
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"{what} failed ({_location(error)}){hint()}")
        raise


def is_short_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory has run out: Python's, torch's or the system's."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in MEMORY_FULL)


def one_line(error: BaseException, if_out_of_memory: str = "") -> str:
    """Return an error as one line: a UserError's message, or any other error's type, message and location.

    Args:
        if_out_of_memory: What to do about an error that says that memory ran out.
    """
    message = " ".join(str(error).split())
    if if_out_of_memory and is_short_of_memory(error):
        return f"it ran out of memory: {if_out_of_memory} ({message or type(error).__name__})"
    if isinstance(error, UserError):
        return message
    return f"{type(error).__name__}: {message} ({_location(error)})"


def _location(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"

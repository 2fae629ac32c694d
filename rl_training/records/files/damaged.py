"""Errors of reading a file that a kill, a full disk or somebody else has left damaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rl_training.errors import UserError

# Whatever is raised by content that is cut off, of other types or without a key.
ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


@contextlib.contextmanager
def naming_the_file(path: Path, problem: str, fix: str, errors: tuple[type[Exception], ...] = ERRORS) -> Iterator[None]:
    """Turn any error of damaged content inside this context into a UserError that names the file, if it does not yet.

    Args:
        path: The file that is read.
        problem: The verb and what follows, such as "is damaged".
        fix: What to do.
        errors: Which errors damage causes.

    Raises:
        UserError: If there is such an error.
    """
    try:
        yield
    except errors as error:
        if isinstance(error, UserError) and str(path) in str(error):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} {problem} ({reason}): {fix}") from error

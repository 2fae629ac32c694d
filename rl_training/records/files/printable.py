r"""Texts of records made safe to show: nothing in them moves a cursor, retitles a window or reorders a line.

A model's response or a run's name may contain characters that a terminal obeys. They are escaped, ESC as \x1b, in
every text for a terminal, a page or a table for other programs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

SURROGATES = re.compile("[\ud800-\udfff]")
# Control characters except tab and line break, line and paragraph separators, marks that change the direction of
# writing, and lone surrogates.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return a text with every unprintable character escaped, and with Unix line breaks.

    >>> printable("a\x1b[2J\r\n\tb")
    'a\\x1b[2J\n\tb'
    """
    return UNPRINTABLE.sub(_escaped, text.replace("\r\n", "\n"))


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("ascii", "backslashreplace").decode() if ord(match[0]) > 127 else f"\\x{ord(match[0]):02x}"


def all_printable(value: Any, to_text: Callable[[str], str] = printable) -> Any:
    """Return nested data with every text in it, keys too, made printable."""
    if isinstance(value, str):
        return to_text(value)
    if isinstance(value, Mapping):
        return {all_printable(key, to_text): all_printable(inner, to_text) for key, inner in value.items()}
    return [all_printable(inner, to_text) for inner in value] if isinstance(value, list | tuple) else value


def escape_surrogates(value: Any) -> Any:
    """Return nested data with lone surrogates escaped, because no file or table can hold them."""
    return all_printable(value, lambda text: SURROGATES.sub(_escaped, text))

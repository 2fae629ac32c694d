"""Texts of records as people may see them: nothing in one moves a cursor, retitles a window, or reorders a line.

What a model has written, or somebody's run is called, may hold characters that a terminal obeys. They are written out
instead, ESC as \\x1b, wherever a text goes to a terminal, into a page or into a table for other programs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

HALVES = re.compile("[\ud800-\udfff]")
# Control characters but tab and line break, separators of lines and paragraphs, marks that turn the direction of
# writing, and halves of a character.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return a text with every unprintable character written out; line breaks are those of Unix.

    >>> printable("a\x1b[2J\r\n\tb")
    'a\\x1b[2J\n\tb'
    """
    return UNPRINTABLE.sub(_written_out, text.replace("\r\n", "\n"))


def _written_out(match: re.Match[str]) -> str:
    return match[0].encode("ascii", "backslashreplace").decode() if ord(match[0]) > 127 else f"\\x{ord(match[0]):02x}"


def all_printable(value: Any, to_text: Callable[[str], str] = printable) -> Any:
    """Return nested data with every text in it made printable, keys too."""
    if isinstance(value, str):
        return to_text(value)
    if isinstance(value, Mapping):
        return {all_printable(key, to_text): all_printable(inner, to_text) for key, inner in value.items()}
    return [all_printable(inner, to_text) for inner in value] if isinstance(value, list | tuple) else value


def in_whole_characters(value: Any) -> Any:
    """Return nested data with halves of characters, which no file and no table can hold, written out."""
    return all_printable(value, lambda text: HALVES.sub(_written_out, text))

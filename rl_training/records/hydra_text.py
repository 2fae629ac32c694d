"""Texts as Hydra's grammar reads them: the values of overrides that a report or an error tells the user to type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

# Hydra takes these as they stand. Anything else is quoted: it may be refused, or read as a number, a list or a sweep.
PLAIN_TEXT = re.compile(r"(?:\.{0,2}/|[A-Za-z_])[A-Za-z0-9_./:-]*")
NOT_TEXT = ("null", "true", "false", "nan", "inf")  # words with a meaning of their own, in any case


def quote_value(text: str) -> str:
    r"""Return a text as a Hydra value, quoted unless Hydra reads it as this text anyway.

    >>> quote_value("lr:0.5"), quote_value("mis:0.5,2"), quote_value("5"), quote_value('a b"\\')
    ('lr:0.5', '"mis:0.5,2"', '"5"', '"a b\\"\\\\"')
    """
    if PLAIN_TEXT.fullmatch(text) and text.lower() not in NOT_TEXT:
        return text
    text = re.sub(r'(\\*)"', r'\1\1\\"', text)  # escape quotes and the backslashes before them
    text = re.sub(r"(\\+)$", r"\1\1", text)  # escape backslashes before the closing quote
    return f'"{text}"'


def quote_list(texts: Sequence[str]) -> str:
    """Return texts as a Hydra list.

    >>> quote_list(["lr:0.5", "mis:0.5,2"])
    '[lr:0.5,"mis:0.5,2"]'
    """
    return f"[{','.join(map(quote_value, texts))}]"


def quote_override(key: str, text: str) -> str:
    r"""Return KEY=VALUE, quoted for the shell and for Hydra, so that the value is taken as this text.

    >>> quote_override("run_dir", "runs/a"), quote_override("run_dir", "my runs")
    ('run_dir=runs/a', '\'run_dir="my runs"\'')
    """
    return shlex.quote(f"{key}={quote_value(text)}")

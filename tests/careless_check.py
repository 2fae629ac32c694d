"""Checks for the tests of guarded workers: they handle text as carelessly as some libraries do."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable


def load() -> Callable[[str, str], Callable[[], str]]:
    print("loaded")  # must not be mistaken for a reply
    return lambda way, text: lambda: _try(way, text)


def _try(way: str, text: str) -> str:
    """Return the outcome as text."""
    print("looking at", ascii(text))
    try:
        if way == "eval":
            return repr(eval(text))
        if way == "exec":
            exec(text)
            return "done"
        if way == "compiled":
            return repr(eval(compile(ast.parse(text, mode="eval"), "answer", "eval")))
        if way == "power":
            return str(len(bin(9 ** int(text))))
        if way == "bytes":
            return str(len(bytes(int(text))))
        return " ".join(sorted({"torch", "trl", "transformers", "numpy"} & set(sys.modules)))
    except RuntimeError as error:
        return f"refused: {error}"

"""Refuses a verl other than the one that this package is written against, in one line with the fix."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

VERSION = (0, 9)  # verl says that the interface of its engine will change
FIX = "pip install 'verl>=0.9,<0.10'"


def refuse_another_version() -> None:
    """Raises ValueError where another version of verl is installed."""
    installed = version("verl")
    if tuple(map(int, installed.split(".")[:2])) != VERSION:
        raise ValueError(f"probes are written against verl 0.9, and this is {installed}: {FIX}")


def refuse_other_methods(subclass: type) -> None:
    """Raises ValueError where a method that `subclass` overrides is gone in verl's class, or takes other arguments."""
    for name, method in vars(subclass).items():
        if inspect.isfunction(method):
            parameters = inspect.signature(method).parameters.values()
            expected = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
            refuse_other_parameters(name, getattr(subclass.__mro__[1], name, lambda: None), expected)


def refuse_other_parameters(name: str, function: Callable[..., Any], expected: list[str]) -> None:
    """Raises ValueError where the parameters of a function of verl's do not begin with these."""
    found = list(inspect.signature(function).parameters)
    if found[: len(expected)] != expected:
        raise ValueError(f"verl has {name}({', '.join(found)}), and probes expect ({', '.join(expected)}): {FIX}")

"""Wraps a method of an object for a while."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_ABSENT = object()  # stands for no attribute, since an attribute may be None


class _Wrapped:
    """A method that is wrapped, until `release`. It then is the original."""

    def __init__(self, method: Callable[..., Any], original: Callable[..., Any]) -> None:
        self._method: Callable[..., Any] | None = method
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._method is None:
            return self._original(*args, **kwargs)
        return self._method(self._original, *args, **kwargs)

    def release(self) -> None:
        self._method = None


def wrap(owner: object, name: str, method: Callable[..., Any], undo: ExitStack) -> None:
    """Make owner.<name>(...) call method(original, ...), until `undo` is closed.

    If someone else has wrapped it meanwhile, their wrapper stays, and calls the original through this one.
    """
    before = vars(owner).get(name, _ABSENT)
    wrapped = _Wrapped(method, getattr(owner, name))

    def unwrap() -> None:
        wrapped.release()
        if vars(owner).get(name) is not wrapped:
            return
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    setattr(owner, name, wrapped)
    undo.callback(unwrap)

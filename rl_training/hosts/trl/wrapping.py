"""Wraps a method of an object until it is given back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_ABSENT = object()  # stands for no attribute, since an attribute may be None


class _Wrapped:
    """Calls a wrapper with the method that it wraps, until `release`. After that it calls the method alone."""

    def __init__(self, wrapper: Callable[..., Any], method: Callable[..., Any]) -> None:
        self._wrapper: Callable[..., Any] | None = wrapper
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._wrapper is None:
            return self._method(*args, **kwargs)
        return self._wrapper(self._method, *args, **kwargs)

    def release(self) -> None:
        self._wrapper = None


def wrap(owner: object, name: str, wrapper: Callable[..., Any], undo: ExitStack) -> None:
    """Make owner.<name>(...) call wrapper(method, ...), until `undo` is closed.

    If someone else has wrapped the method meanwhile, their wrapper stays, and calls the method through this one.

    Args:
        owner: The object, a module for instance.
        name: The name of the method.
        wrapper: Gets the method, and the arguments of each call.
        undo: Gives the method back when it is closed.
    """
    before = vars(owner).get(name, _ABSENT)
    wrapped = _Wrapped(wrapper, getattr(owner, name))

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

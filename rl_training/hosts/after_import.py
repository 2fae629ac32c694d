"""Call a function as soon as a module has been imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class _AfterImport(MetaPathFinder):
    """Finds one module as the other finders do, and calls a function once it has been imported."""

    def __init__(self, name: str, then: Callable[[types.ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        place = sys.meta_path.index(self)
        del sys.meta_path[place]  # so that only the other finders are asked
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(place, self)  # the module may only be looked for, and imported later
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(name: str, then: Callable[[Any], None]) -> None:
    """Call a function with a module as soon as it has been imported, or now if it has been already."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))

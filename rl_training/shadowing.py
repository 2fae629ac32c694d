"""A file of the user's own that was imported in the place of a package of its name, as six.py beside a script.

Python looks in the folder of the script before it looks for its own modules and for installed packages.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path


def what_shadows(error: BaseException) -> str:
    """Returns the line for an error that comes of such a file, with the fix; "" for any other error.

    It comes of it where the error names the file or the module, or was raised in it.
    """
    first, rest = Path(sys.path[0] or ".").resolve(), [entry for entry in sys.path[1:] if entry]
    if first in {Path(folder).resolve() for folder in sysconfig.get_paths().values()}:
        return ""
    errors = list(_chain(error))
    texts = " ".join(f"{each} {getattr(each, 'name', '')}" for each in errors)
    raised_in = {Path(frame.filename) for each in errors for frame in traceback.extract_tb(each.__traceback__)}
    loaded = {Path(file) for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))}
    for path in sorted(loaded | raised_in):
        place = path.parent if path.name == "__init__.py" else path
        name, is_named = place.stem, path in raised_in or str(path) in texts or f"'{place.stem}" in texts
        if is_named and place.parent.resolve() == first and _is_elsewhere(name, path, rest):
            return f"{path} was imported in the place of the module {name} that others need: rename this file"
    return ""


def _is_elsewhere(name: str, path: Path, rest: list[str]) -> bool:
    """Returns whether Python has a module of this name, or one is installed, in another file than this one."""
    found = PathFinder.find_spec(name, rest)
    is_installed = found is not None and found.origin is not None and Path(found.origin).resolve() != path.resolve()
    return name in sys.stdlib_module_names or is_installed


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and those that it was raised from, or while they were handled."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__

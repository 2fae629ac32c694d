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


def explain_shadowing(error: BaseException) -> str:
    """Say which file was imported in the place of a package, and the fix, where an error comes of that; else return "".

    An error comes of such a file where it names the file or the module, or was raised in it.
    """
    script_folder = Path(sys.path[0] or ".").resolve()
    if script_folder in {Path(folder).resolve() for folder in sysconfig.get_paths().values()}:
        return ""
    other_folders = [entry for entry in sys.path[1:] if entry]
    errors = list(_chain(error))
    texts = " ".join(f"{link} {getattr(link, 'name', '')}" for link in errors)
    raised_in = {Path(frame.filename) for link in errors for frame in traceback.extract_tb(link.__traceback__)}
    loaded = {Path(file) for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))}
    for path in sorted(loaded | raised_in):
        place = path.parent if path.name == "__init__.py" else path
        name = place.stem
        is_named = path in raised_in or str(path) in texts or f"'{name}" in texts
        if is_named and place.parent.resolve() == script_folder and _is_elsewhere(name, path, other_folders):
            return f"{path} was imported in the place of the module {name} that others need: rename this file"
    return ""


def _is_elsewhere(name: str, path: Path, folders: list[str]) -> bool:
    """Return whether a module of this name belongs to Python, or is installed in another file than `path`."""
    spec = PathFinder.find_spec(name, folders)
    is_installed = spec is not None and spec.origin is not None and Path(spec.origin).resolve() != path.resolve()
    return name in sys.stdlib_module_names or is_installed


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and the errors that it was raised from or while handling; one that is its own cause once."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__

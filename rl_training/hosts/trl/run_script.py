"""Run a script or module as Python does: its arguments, `__main__`, folder in the path, exit code and tracebacks."""

from __future__ import annotations

import builtins
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

Refuse = Callable[[str], NoReturn]  # ends the command with a message


def run_script(path: str, arguments: Sequence[str], refuse: Refuse) -> None:
    """Run a script with these arguments. `refuse` is called if it cannot be read."""
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        refuse(f"the script {path} cannot be read: {error.strerror}")

    def make_code() -> types.CodeType:
        return compile(source, path, "exec", dont_inherit=True)  # without the `from __future__` of this file

    _run(make_code, Path(path).resolve().parent, [path, *arguments], {"__file__": path})


def run_module(name: str, arguments: Sequence[str], refuse: Refuse) -> None:
    """Run a module with these arguments, as `python -m` does. `refuse` is called if it cannot be found."""
    _set_script_folder(Path.cwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        refuse(f"the module {name} cannot be found: {error}")
    if spec is None or spec.origin is None:
        refuse(f"the module {name} cannot be found or run")
    loader: Any = spec.loader
    attributes = {"__file__": spec.origin, "__spec__": spec, "__package__": spec.parent, "__loader__": loader}
    _run(lambda: loader.get_code(spec.name), Path.cwd(), [spec.origin, *arguments], attributes)


def _set_script_folder(folder: Path) -> None:
    """Put a script's folder where Python puts it, unless it was told not to (python -P)."""
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)


def _run(
    make_code: Callable[[], types.CodeType], folder: Path, arguments: list[str], attributes: dict[str, Any]
) -> None:
    """Run code as `__main__`.

    Args:
        make_code: Returns the code. A SyntaxError is shown like one of Python itself.
        folder: Goes into Python's path.
        arguments: sys.argv.
        attributes: Of the module `__main__`.
    """
    _set_script_folder(folder)
    sys.argv = arguments
    module = types.ModuleType("__main__")
    vars(module).update({"__builtins__": builtins, **attributes})
    sys.modules["__main__"] = module
    try:
        exec(make_code(), vars(module))
    except SystemExit as ended:
        if ended.code:
            raise
    except BaseException:
        _hide_own_frames(module)
        raise


def _hide_own_frames(module: types.ModuleType) -> None:
    """Let the traceback of the error that ends this process begin in the script, whatever shows it."""
    show = sys.excepthook

    def show_from_script(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_globals is not vars(module):
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = show_from_script

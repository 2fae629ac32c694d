"""The one error meant for the user: commands print only its message, but the traceback of any other error.

Errors in functions that the user wrote are told apart from the package's own, with file and line. Errors of imports
become one line too: which extra installs a missing library, since `pip install rl-training` alone is enough for
`attach` (setup.cfg), and which user's file hides a package.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

MEMORY_FULL = ("allocate memory", "not enough memory", "out of memory")  # messages on Linux, Windows and devices
LIBRARIES = {  # by extra: the import names of libraries that no smaller extra installs
    "report": "pandas vl_convert jinja2 rich",
    "train": "hydra omegaconf peft datasets tensorboard",
    "dashboard": "wandb_workspaces",
    "qlora": "bitsandbytes",
    "reasoning-gym": "reasoning_gym",
    "smollm2": "gguf",
    **{name: name for name in ("wandb", "trackio", "deepspeed", "vllm", "verl")},
}
EXTRA_OF = {library: extra for extra, libraries in LIBRARIES.items() for library in libraries.split()}


class UserError(ValueError):
    """What the user asked for cannot be done, because of a setting, a file, the machine or the user's own code.

    The message names the cause and the fix, in one line. Any other exception is a bug in the program.
    """


@contextlib.contextmanager
def wrap_user_errors(what: str) -> Iterator[None]:
    """Turn any failure inside the context, even sys.exit(), into a UserError that begins with `what`.

    Example: with what "intervention f": "intervention f failed: ZeroDivisionError: division by zero (f.py:2)".
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{what} failed: {message} ({_location(error)})") from error


@contextlib.contextmanager
def add_note_on_error(what: str, hint: Callable[[], str] = str) -> Iterator[None]:
    """Add a note to any error raised inside the context. Its type stays the same for callers that catch it.

    Args:
        what: The beginning of the note. "reward function f" gives "reward function f failed (f.py:2)".
        hint: Returns advice that is appended to the note.
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"{what} failed ({_location(error)}){hint()}")
        raise


def is_short_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory has run out: Python's, torch's or the system's."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in MEMORY_FULL)


def one_line(error: BaseException, if_out_of_memory: str = "") -> str:
    """Return an error as one line: a UserError's message, or any other error's type, message and location.

    Args:
        if_out_of_memory: What to do about an error that says that memory ran out.
    """
    message = " ".join(str(error).split())
    if if_out_of_memory and is_short_of_memory(error):
        return f"it ran out of memory: {if_out_of_memory} ({message or type(error).__name__})"
    if isinstance(error, UserError):
        return message
    return f"{type(error).__name__}: {message} ({_location(error)})"


def _location(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


# --- a library of an extra is missing ---------------------------------------------------------------------------------


class ExtraNotFoundError(UserError, ModuleNotFoundError):
    """A library of an extra is not installed. The message says what to type."""


def how_to_install(library: str) -> str:
    """Return the command that installs a library of an extra, or "" for any other library."""
    extra = EXTRA_OF.get(library)
    return f"pip install 'rl-training[{extra}]'" if extra else ""


@contextlib.contextmanager
def require_extra() -> Iterator[None]:
    """Run imports so that the error for a missing library names its extra, and for a shadowed library the file.

    Raises:
        ExtraNotFoundError: A library of an extra is not installed.
        UserError: A user's file was imported instead of a package.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        library = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if fix := how_to_install(library):
            raise ExtraNotFoundError(f"{library} is not installed: {fix}") from error
        if line := explain_shadowing(error):
            raise UserError(line) from error
        raise


# --- a user's file hides a package ------------------------------------------------------------------------------------


def explain_shadowing(error: BaseException) -> str:
    """Return a line that names the file imported instead of a package, and the fix; "" if that is not the cause.

    A user's file hides a package of the same name, such as six.py next to a script, because Python searches the
    script's folder before its standard library and installed packages. It is the cause of an error that names the file
    or its module, or that was raised in it.
    """
    script_folder = Path(sys.path[0] or ".").resolve()
    if not script_folder.is_dir() or script_folder in {
        Path(folder).resolve() for folder in sysconfig.get_paths().values()
    }:
        return ""
    other_folders = [entry for entry in sys.path[1:] if entry]
    errors = list(_chain(error))
    texts = " ".join(f"{link} {getattr(link, 'name', '')}" for link in errors)
    raised_in = {frame.f_code.co_filename for link in errors for frame, _ in traceback.walk_tb(link.__traceback__)}
    loaded = {str(file) for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))}
    beside = set(os.listdir(script_folder))  # checked first: of thousands of loaded modules, few can be there
    for file in sorted(file for file in loaded | raised_in if os.path.basename(_place(file)) in beside):
        place = Path(_place(file))
        name = place.stem
        is_named = file in raised_in or file in texts or f"'{name}" in texts
        if is_named and place.parent.resolve() == script_folder and _is_elsewhere(name, Path(file), other_folders):
            return f"{file} was imported in the place of the module {name} that others need: rename this file"
    return ""


def _place(file: str) -> str:
    """Return what a module's name refers to: its file, or the folder of a package."""
    folder, name = os.path.split(file)
    return folder if name == "__init__.py" else file


def _is_elsewhere(name: str, path: Path, folders: list[str]) -> bool:
    """Return whether a module of this name belongs to Python, or is installed in another file than `path`."""
    spec = PathFinder.find_spec(name, folders)
    is_installed = spec is not None and spec.origin is not None and Path(spec.origin).resolve() != path.resolve()
    return name in sys.stdlib_module_names or is_installed


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it or were being handled when it was raised, each once."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__

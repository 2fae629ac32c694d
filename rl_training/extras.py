"""Which extra installs which library: `pip install rl-training` alone is enough for `attach` (setup.cfg).

`from rl_training.records import metrics` and the commands say in one line which extra is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rl_training.errors import UserError
from rl_training.shadowing import explain_shadowing

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

"""Which extra brings a library: `pip install rl-training` alone is what `attach` needs (setup.cfg).

`from rl_training.records import metrics` and commands say so in one line where a library is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rl_training.errors import UserError
from rl_training.shadowing import explain_shadowing

LIBRARIES = {  # by extra, the libraries that it brings and no smaller one does, by the names that are imported
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
    """A library is not installed that an extra brings; the text says what to type."""


def how_to_install(library: str) -> str:
    """Return what to type for a library of an extra, or "" for any other library."""
    extra = EXTRA_OF.get(library)
    return f"pip install 'rl-training[{extra}]'" if extra else ""


@contextlib.contextmanager
def require_extra() -> Iterator[None]:
    """Run imports so that a missing library's error names its extra, and a shadowed library's error the file.

    Raises:
        ExtraNotFoundError: when a library of an extra is not installed.
        UserError: when a file of the user's was imported in the place of a package.
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

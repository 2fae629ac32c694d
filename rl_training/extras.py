"""Which extra brings a library: `pip install rl-training` alone is what `attach` needs (setup.cfg).

`from rl_training.records import metrics` and commands say so in one line where a library is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rl_training.errors import UserError
from rl_training.shadowing import what_shadows

LIBRARIES = {  # by extra, the libraries that it brings and no smaller one does, by the names that are imported
    "report": "pandas vl_convert jinja2 rich yaml",
    "train": "hydra omegaconf peft datasets tensorboard tqdm",
    "dashboard": "wandb_workspaces",
    "qlora": "bitsandbytes",
    "reasoning-gym": "reasoning_gym",
    "smollm2": "gguf",
    **{name: name for name in ("wandb", "trackio", "deepspeed", "vllm", "verl")},
}
EXTRA_OF = {library: extra for extra, libraries in LIBRARIES.items() for library in libraries.split()}


def how_to_install(library: str) -> str:
    """Returns what to type for a library of an extra; "" for any other."""
    extra = EXTRA_OF.get(library)
    return f"pip install 'rl-training[{extra}]'" if extra else ""


def what_is_missing(error: BaseException) -> str:
    """Returns the line for an import that failed because an extra is not installed; "" for any other error."""
    library = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    fix = how_to_install(library)
    return fix and f"{library} is not installed: {fix}"


@contextlib.contextmanager
def of_an_extra() -> Iterator[None]:
    """A context of imports: the error of a library that is missing names the extra, that of a shadowed one the file."""
    try:
        yield
    except Exception as error:
        if line := what_is_missing(error):
            raise ModuleNotFoundError(line, name=getattr(error, "name", None)) from error
        if line := what_shadows(error):
            raise UserError(line) from error
        raise

"""Which extra brings a library: `pip install rl-training` alone is what `attach` needs (setup.cfg).

`from rl_training.records import metrics` and commands say so in one line where a library is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

EXTRA_OF = {  # the smallest that has it, by the name that is imported
    "pandas": "report",
    "matplotlib": "report",
    "jinja2": "report",
    "rich": "report",
    "yaml": "report",
    "hydra": "train",
    "omegaconf": "train",
    "peft": "train",
    "datasets": "train",
    "math_verify": "train",
    "tensorboard": "train",
    "tqdm": "sync",
    "fsspec": "sync",
    "sshfs": "sync-ssh",
    "s3fs": "sync-s3",
    "wandb": "wandb",
    "trackio": "trackio",
    "wandb_workspaces": "dashboard",
    "deepspeed": "deepspeed",
    "bitsandbytes": "qlora",
    "vllm": "vllm",
    "verl": "verl",
    "reasoning_gym": "reasoning-gym",
}


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
    """A context in which a library that is missing is an ImportError that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if line := what_is_missing(error):
            raise ImportError(line, name=error.name) from error
        raise

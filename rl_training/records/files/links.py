"""Links that lead out of a run folder: nothing is read or written through them.

A run may come from somebody else, in an archive that keeps links: `report` as one into a home folder, config.yaml as
one to a file of secrets. A link within the run stays what it is, and so does one above it: the path of a run may well
be a link itself. So may the weights in a checkpoint, which are only read.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from rl_training.errors import UserError
from rl_training.records.folder import LOGS_FOLDER, TRAINING_STATE, WRITTEN

WANDB = Path(LOGS_FOLDER, "wandb")  # its runs link to logs in the user's cache


def refuse_links_out(run: Path, *names: str) -> None:
    """Raise ValueError for a link out of the run, and for what is neither a file nor a folder, as a pipe.

    names  of files and folders of the run, each with all that lies in it; those of WRITTEN where none is given.
           What lies in checkpoints is left out, and what in W&B's folder, which nothing here reads
    """
    home = run.resolve()
    left = [run / name for name in names or WRITTEN]
    while left:
        path = left.pop()
        if path.is_symlink():
            if not path.resolve().is_relative_to(home):
                raise UserError(
                    f"{path} is a link that leads out of {run}, to {path.resolve()}: nothing is read or written "
                    "through it; remove it, or put what it leads to in its place"
                )
        elif path.is_dir():
            if path.parent.name != TRAINING_STATE and path.relative_to(run) != WANDB:
                with suppress(FileNotFoundError), os.scandir(path) as entries:  # a run may be going on
                    left += [path / entry.name for entry in entries if not entry.is_file(follow_symlinks=False)]
        elif path.exists() and not path.is_file():
            raise UserError(f"{path} is neither a file nor a folder: remove it")


def leads_out_of_its_run(checkpoint: Path) -> bool:
    """Return whether a checkpoint of a run is a link, or lies behind one, to a folder outside of this run."""
    is_in_a_run = checkpoint.parent.name == TRAINING_STATE
    return is_in_a_run and not checkpoint.resolve().is_relative_to(checkpoint.parents[1].resolve())

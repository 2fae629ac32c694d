"""Where a run comes from: version, commit, command (secrets masked), machine, start time, library versions."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path

from rl_training.records.files.masking import mask_arguments
from rl_training.version import VERSION

LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "vllm")


def provenance() -> dict[str, str]:
    """Return the facts about this process's code, command and machine, as text."""
    distributions = {
        name: next(iter(metadata.distributions(name=name)), None) for name in LIBRARIES
    }  # the first found is the one that is imported
    return {
        "version": VERSION,
        "commit": _commit(Path(__file__).parent, Path(__file__).name),
        "working_folder_commit": _commit(Path.cwd()),
        "command": shlex.join([Path(sys.argv[0]).name, *mask_arguments(sys.argv[1:])]),
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "libraries": ", ".join(f"{name} {of.version}" for name, of in distributions.items() if of),
    }


def _commit(folder: Path, file: str = "") -> str:
    """Return the commit that a folder is checked out at, noting uncommitted changes; "" outside of a repository.

    Args:
        file: A file in it that the repository must have: an installed package lies in that of the user's project.
    """
    if file and not _git(["ls-files", "--error-unmatch", file], folder):
        return ""
    description = _git(["describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"], folder)
    return description.strip().replace("-dirty", ", with changes that are not committed")


def _git(arguments: list[str], folder: Path) -> str:
    """Return what git prints in a folder; "" if it fails."""
    words = ["git", *arguments]
    try:
        return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""

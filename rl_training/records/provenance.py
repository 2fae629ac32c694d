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
        "commit": _commit(Path(__file__).parent),
        "working_folder_commit": _commit(Path.cwd()),
        "command": shlex.join([Path(sys.argv[0]).name, *mask_arguments(sys.argv[1:])]),
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "libraries": ", ".join(f"{name} {of.version}" for name, of in distributions.items() if of),
    }


def _commit(folder: Path) -> str:
    """Return the commit that a folder is checked out at, noting uncommitted changes; "" outside of a repository."""
    words = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        shown = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return shown.strip().replace("-dirty", ", with changes that are not committed")

"""Where a run comes from: version, commit, command, machine, date, library versions."""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path

from rl_training.version import VERSION

LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "vllm")
SECRET = re.compile(r"((?:token|key|secret|password)\w*=)\S+", re.IGNORECASE)


def provenance() -> dict[str, str]:
    """Returns what is known of this process's code, command and machine, in words."""
    return {
        "version": VERSION,
        "commit": _commit(),
        "command": SECRET.sub(r"\1***", shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "libraries": ", ".join(f"{name} {version}" for name in LIBRARIES if (version := _version(name))),
    }


def _commit() -> str:
    """Returns the commit of the checkout that this package lies in, and whether it was changed; "" outside of one."""
    here = Path(__file__).parent
    try:
        shown = [
            subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.SubprocessError):
        return ""
    return shown[0].strip() + (", with changes that are not committed" if shown[1].strip() else "")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""

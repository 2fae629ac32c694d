"""Where a run comes from: version, commit, command, machine, date, library versions; and secrets, masked everywhere.

Run folders are shared: tokens and passwords are masked in everything that a run writes.
"""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rl_training.version import VERSION

LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "vllm")
SECRETS = ("token", "password", "secret", "api_key")  # how the names of secret settings end
OF_TOKENIZERS = ("eos_", "pad_", "bos_")
MASK = "***"
SECRET = re.compile(r"((?:token|key|secret|password)\w*=)\S+", re.IGNORECASE)


def provenance() -> dict[str, str]:
    """Returns what is known of this process's code, command and machine, in words."""
    found = {name: next(iter(metadata.distributions(name=name)), None) for name in LIBRARIES}  # as it is imported
    return {
        "version": VERSION,
        "commit": _commit(),
        "command": SECRET.sub(r"\1***", shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "libraries": ", ".join(f"{name} {of.version}" for name, of in found.items() if of),
    }


def _commit() -> str:
    """Returns the commit of the checkout that this package lies in, and whether it was changed; "" outside of one."""
    here = Path(__file__).parent
    words = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        shown = subprocess.run(words, cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return shown.strip().replace("-dirty", ", with changes that are not committed")


def without_secrets(node: Any, name: str = "") -> Any:
    """Returns a setting, of this name, or a nested mapping of settings, with tokens and passwords masked."""
    if isinstance(node, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in node.items()}
    is_secret = isinstance(node, str) and any(name == word or name.endswith(f"_{word}") for word in SECRETS)
    return MASK if is_secret and not name.startswith(OF_TOKENIZERS) else node

"""Imported before the libraries that it silences: hides messages that the user cannot act on.

The first import of every command and of every process that one starts; pyproject.toml has it sorted there.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import logging
import sys
import warnings
from typing import Any

SILENCED = {
    # Where it is installed, bitsandbytes misses a kernel on some CPUs, also where no weights are 4-bit.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU",
    # Where it is installed, DeepSpeed says on a machine without a GPU that it has found none, used or not.
    "DeepSpeed": "Setting accelerator to CPU",
    # A head that is tied to the embedding is not saved, and is missed whenever a run goes on.
    "transformers.trainer": "missing keys in the checkpoint model loaded: ['lm_head.weight']",
}


# Prints at its import, where WANDB_MODE=offline, that W&B is offline, used or not. Where it is used, W&B says so.
PRINTS = "transformers.integrations.integration_utils"


class ImportsInSilence(importlib.abc.MetaPathFinder):
    """Finds PRINTS, once, and lets it be imported without its print."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != PRINTS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def in_silence(module: Any) -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                execute(module)

        spec.loader.exec_module = in_silence  # type: ignore[method-assign]
        return spec


def _says_something_else(record: logging.LogRecord) -> bool:
    return SILENCED[record.name] not in record.getMessage()


sys.meta_path.insert(0, ImportsInSilence())
for name in SILENCED:
    logging.getLogger(name).addFilter(_says_something_else)
# TRL still uses names that transformers has deprecated.
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

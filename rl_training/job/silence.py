"""Imported before the libraries that it silences: hides messages that the user cannot act on.

The first import of every command and of every process that one starts; pyproject.toml has it sorted there.
"""

from __future__ import annotations

import logging
import warnings

SILENCED = {
    # Where it is installed, bitsandbytes misses a kernel on some CPUs, also where no weights are 4-bit.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU",
    # Where it is installed, DeepSpeed says on a machine without a GPU that it has found none, used or not.
    "DeepSpeed": "Setting accelerator to CPU",
    # A head that is tied to the embedding is not saved, and is missed whenever a run goes on.
    "transformers.trainer": "missing keys in the checkpoint model loaded: ['lm_head.weight']",
}

for name in SILENCED:
    logging.getLogger(name).addFilter(lambda record: SILENCED[record.name] not in record.getMessage())
# TRL still uses names that transformers has deprecated.
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

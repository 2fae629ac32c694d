"""Hides messages of libraries that the user cannot act on. Import it before those libraries.

It is the first import of every command and of every process that a command starts; pyproject.toml makes ruff sort it
first.
"""

from __future__ import annotations

import logging
import warnings

SILENCED = {
    # If installed, bitsandbytes reports a missing kernel on some CPUs, even when no weights are 4-bit.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU",
    # If installed, DeepSpeed reports on machines without a GPU that it found none, even when it is not used.
    "DeepSpeed": "Setting accelerator to CPU",
    # A head tied to the embedding is not saved, so transformers reports it missing on every resume.
    "transformers.trainer": "missing keys in the checkpoint model loaded: ['lm_head.weight']",
}

for name in SILENCED:
    logging.getLogger(name).addFilter(lambda record: SILENCED[record.name] not in record.getMessage())
# TRL still uses deprecated names of transformers.
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

"""Imported before the libraries that it silences: what they print of themselves, and nobody can do anything about.

The first import of every command and of every process that one starts; pyproject.toml has it sorted there.
"""

from __future__ import annotations

import logging
import warnings

# TRL still uses names that transformers has deprecated.
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
# Where it is installed, bitsandbytes misses a kernel on some CPUs, also where no weights are 4-bit.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# Where it is installed, DeepSpeed says on a machine without a GPU that it has found none, also where it is not used.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())

"""Downloading runs: from a folder, another machine or a store, to a folder here; again and again while they run.

listing.py    what the source holds, and which of it is wanted
copying.py    one file, whole or not at all; one pass over all of them
command.py    rl-training sync SOURCE DESTINATION
"""

from rl_training.records.sync.copying import Outcome, sync_once

__all__ = ["Outcome", "sync_once"]

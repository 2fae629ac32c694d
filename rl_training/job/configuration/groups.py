"""The groups of conf/ that make a run, and the keys of its settings that their options fill.

Whatever depends on which groups there are, and on what kind, is derived here.
"""

from __future__ import annotations

# Groups of which exactly one option is chosen. It fills the key of the same name, and an object is made from it.
SINGLE_OPTION = ("trainer", "model", "adapter", "data", "buffer")
# By group, the key that its options fill. Options of `logger` also set trainer.report_to.
KEY_OF = {**{group: group for group in SINGLE_OPTION}, "probe": "probes", "logger": "logger"}
# Groups that accept any setting: what is made from them refuses those that it does not have.
OPEN = tuple(group for group in SINGLE_OPTION if group != "buffer")
# Groups whose option can be changed where the settings are those of a stored run.
CHANGEABLE = {group: key for group, key in KEY_OF.items() if group != "trainer"}
# Groups whose options have a `_target_`: directly, or (probes) one level below.
WITH_TARGET = {group: key for group, key in KEY_OF.items() if group != "logger"}
OF_EVALUATION = ("model", "adapter", "data")  # groups that an evaluation can replace
TRAINER_KEYS = (*SINGLE_OPTION, "intervention")  # settings from which the trainer is made
REQUIRED_KEYS = ("seed", "batch", *SINGLE_OPTION, "probes")  # settings without which a stored run cannot be analyzed

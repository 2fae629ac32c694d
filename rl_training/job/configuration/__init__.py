"""Turns the command line into one checked configuration. Nothing here imports torch, so a mistyped value fails at once.

composition.py    composes conf/ and the command line with Hydra
shipped.py        locates conf/, launch/ and probe_configs/; the commands that copy them
groups.py         the groups of conf/ that make a run
overrides.py      parses settings as typed, KEY=VALUE, and applies them
sweep.py          names the folders of a sweep's jobs; loggers.py chooses the dashboards of several loggers
run_settings.py   settings of a stored run: to branch from, resume or analyze it
stored.py         reads files of settings that may come from somebody else, so that nothing in them runs
custom_code.py    makes the user's own code importable if it is named
prepare.py        prepares the settings of each command: normalized, checked and typed
checks.py         the checks of settings; values.py checks single values against ranges.yaml
probe_group.py    the group `probe`, for a command of another package
nested.py         nested settings and their dotted keys
hydra_errors.py   explains Hydra's errors in plain words
"""

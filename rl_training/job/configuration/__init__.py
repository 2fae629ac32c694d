"""From what was typed to one checked configuration; nothing here imports torch, so that a mistyped value fails at once.

composition.py    Hydra composes the files of conf/ with the command line
shipped.py        where conf/ lies, and the commands that copy it
overrides.py      settings as they are typed, KEY=VALUE, and what they change
run_settings.py   the settings of a stored run: to branch from, to resume, to analyze
stored.py         files of settings that may be somebody else's: read so that nothing in them runs
custom_code.py    the user's own code, imported where it is named
checks.py         what each command refuses; values.py judges single values, by ranges.yaml
nested.py         nested settings by dotted keys
hydra_errors.py   Hydra's errors in plain words
"""

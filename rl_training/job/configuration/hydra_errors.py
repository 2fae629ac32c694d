"""What Hydra and OmegaConf say of a mistyped command line, in one line of plain words that names key, value and fix."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from rl_training.job.configuration.checks import choose_probes
from rl_training.job.configuration.nested import flat, load_plain
from rl_training.job.configuration.shipped import CONF, conf_folders
from rl_training.job.configuration.values import did_you_mean, quoted


def explain(error: Exception) -> str:
    """Returns what Hydra or OmegaConf says of the command line in one line, with what may have been meant."""
    message = " ".join(str(error).split())
    if isinstance(error, OmegaConfBaseException):
        return message
    if isinstance(error, OverrideParseException):
        typed = error.override.removeprefix("++")
        key, equals, value = typed.partition("=")
        if not equals:
            return f"{typed}: a setting is KEY=VALUE, see --help"
        signs = "signs like = ~ ( ) [ ] , { } and letters outside of ASCII"
        return f"{typed}: {signs} need quotes: {quoted(key, value)}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = _options_of(group)
        hint = did_you_mean(name, options)
        return f"{group}={name}: there is no such {group}. Choose from {', '.join(options)}{hint}"
    cause = error.__cause__
    key = str(cause.full_key) if isinstance(cause, OmegaConfBaseException) else ""
    is_choice = (CONF / key).is_dir()
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and not is_choice:
        typed_keys = (re.split("[=@]", word.lstrip("+~"))[0] for word in sys.argv[1:])
        key = next((typed for typed in typed_keys if f"{typed}.".startswith(f"{key}.")), key)
        return f"{key}: there is no such setting, see --help{did_you_mean(key, _known_settings())}"
    named = next((word for word in sys.argv[1:] if word.startswith("probes=")), "")
    if key == "probes" and named:
        return choose_probes(named.removeprefix("probes="))
    if cause and not is_choice:
        return f"{message}: it takes no value of this kind; for a list: '{key}=[…]'"
    choices = (word.lstrip("+").partition("=") for word in sys.argv[1:])
    wrong = [(group, name) for group, _, name in choices if (CONF / group).is_dir() and name not in _options_of(group)]
    if wrong and (cause or isinstance(error, ValueError | TypeError)):
        group, name = wrong[0]
        options = _options_of(group)
        return f"{group}={name}: give a name, or names as in '{group}=[{options[0]}]': {', '.join(options)}"
    return message


def _options_of(group: str) -> list[str]:
    return sorted({path.stem for folder in conf_folders() for path in (folder / group).glob("*.yaml")})


def _known_settings() -> dict[str, str]:
    """Returns by setting of this command, and of what can be chosen, how it is said, with what would have it."""
    command = Path(sys.argv[0]).stem.replace("analyze", "offline")
    own = CONF / f"{command}.yaml" if command in ("offline", "evaluate") else CONF / "train.yaml"
    known = {path.name: path.name for path in CONF.iterdir() if path.is_dir()}
    for path in sorted(CONF.glob("*/*.yaml")):
        group, content = path.parent.name, load_plain(path)
        content = content.get(group, content)  # under the group's name or without it
        for name in flat({"probes" if group == "probe" else group: content}):
            known.setdefault(name, f"{name} (of {group}={path.stem})")
    return known | {name: name for name in flat(load_plain(own))}

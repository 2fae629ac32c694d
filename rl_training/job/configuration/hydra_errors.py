"""Explains errors of Hydra, OmegaConf and YAML about a mistyped command line in one line with key, value and fix."""

from __future__ import annotations

import re
import sys

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from rl_training.job.configuration.checks import choose_probes
from rl_training.job.configuration.groups import KEY_OF
from rl_training.job.configuration.nested import flatten, load_plain
from rl_training.job.configuration.shipped import CONF, conf_folders
from rl_training.options import did_you_mean
from rl_training.records.hydra_text import quote_override


def explain(error: Exception, name: str) -> str:
    """Explain in one line what was mistyped, and suggest what may have been meant.

    Args:
        error: The error.
        name: File in conf/ that was composed, without `.yaml`.

    Returns:
        The line, or "" if the error was caused by a bug rather than by a setting.
    """
    message = " ".join(str(error).split())
    if isinstance(error, OmegaConfBaseException | yaml.YAMLError):
        return message
    if isinstance(error, OverrideParseException):
        return _explain_quotes(error.override.removeprefix("++"))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        options = _options_of(group)
        hint = did_you_mean(option, options)
        return f"{group}={option}: there is no such {group}. Choose from {', '.join(options)}{hint}"
    cause = error.__cause__
    key = str(cause.full_key) if isinstance(cause, OmegaConfBaseException) else ""
    is_group = (CONF / key).is_dir()
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and not is_group:
        typed_keys = (re.split("[=@]", word.lstrip("+~"))[0] for word in sys.argv[1:])
        key = next((typed for typed in typed_keys if f"{typed}.".startswith(f"{key}.")), key)
        return f"{key}: there is no such setting, see --help{did_you_mean(key, _known_settings(name))}"
    typed_probes = next((word.lstrip("+") for word in sys.argv[1:] if word.lstrip("+").startswith("probes=")), "")
    if key == "probes" and typed_probes:
        return choose_probes(typed_probes.removeprefix("probes="))
    if cause and not is_group:
        return f"{message}: it takes no value of this kind; for a list: '{key}=[…]'"
    if (cause or isinstance(error, ValueError | TypeError)) and (line := _explain_choice()):
        return line
    return message if isinstance(error, HydraException) else ""


def _explain_quotes(typed: str) -> str:
    """Return how to type an argument that Hydra's grammar cannot parse."""
    key, equals, value = typed.partition("=")
    if not equals:
        return f"{typed}: a setting is KEY=VALUE, see --help"
    signs = "signs like = ~ ( ) [ ] , { } and letters outside of ASCII"
    return f"{typed}: {signs} need quotes: {quote_override(key, value)}"


def _explain_choice() -> str:
    """Name the first typed GROUP=VALUE whose value is not an option of the group, such as model=null; "" if none."""
    for word in sys.argv[1:]:
        group, _, name = word.lstrip("+").partition("=")
        if (CONF / group).is_dir() and name not in (options := _options_of(group)):
            return f"{group}={name}: give a name, or names as in '{group}=[{options[0]}]': {', '.join(options)}"
    return ""


def _options_of(group: str) -> list[str]:
    return sorted({path.stem for folder in conf_folders() for path in (folder / group).glob("*.yaml")})


def _known_settings(name: str) -> dict[str, str]:
    """Return the settings of conf/NAME.yaml and of all options of its groups.

    Returns:
        By setting, its name in a hint, which includes the GROUP=OPTION that defines it, if any.
    """
    known = {path.name: path.name for path in CONF.iterdir() if path.is_dir()}
    for path in sorted(CONF.glob("*/*.yaml")):
        group = path.parent.name
        content = load_plain(path)
        content = content.get(group, content)  # under the group's name or without it
        for key in flatten({KEY_OF.get(group, group): content}):
            known.setdefault(key, f"{key} (of {group}={path.stem})")
    return known | {key: key for key in flatten(load_plain(CONF / f"{name}.yaml"))}

"""Explains errors of Hydra, OmegaConf and YAML about a mistyped command line in one line with key, value and fix."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from rl_training.job.configuration.checks import choose_probes
from rl_training.job.configuration.groups import OPEN
from rl_training.job.configuration.nested import flatten, load_plain
from rl_training.job.configuration.shipped import CONF, conf_folders
from rl_training.options import did_you_mean
from rl_training.records.hydra_text import quote_override

HEADER = "# @package "
EVERYTHING = "_global_"  # package of a file in conf/ whose settings are those of a whole command


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
        typed, kind = (f"{group}={option}", group) if group else (f"--config-name={option}", "configuration")
        return f"{typed}: there is no such {kind}. Choose from {', '.join(options)}{hint}"
    cause = error.__cause__
    key = str(cause.full_key) if isinstance(cause, OmegaConfBaseException) else ""
    is_group = (CONF / key).is_dir()
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and not is_group:
        typed_keys = (re.split("[=@]", word.lstrip("+~"))[0] for word in sys.argv[1:])
        key = next((typed for typed in typed_keys if f"{typed}.".startswith(f"{key}.")), key)
        group = key.partition(".")[0]
        added = f"; an argument that conf/ does not list is added with +{key}=VALUE" if group in OPEN else ""
        return f"{key}: there is no such setting, see --help{did_you_mean(key, _known_settings(name))}{added}"
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
    settings = load_plain(CONF / f"{name}.yaml")
    groups = {group for entry in settings.pop("defaults") if isinstance(entry, dict) for group in entry}
    known = {key: key for key in flatten(settings)} | {group: group for group in groups if (CONF / group).is_dir()}
    files = sorted(CONF.glob("*/*.yaml"), key=lambda path: (_package_of(path) == EVERYTHING, path))
    for path in (path for path in files if path.parent.name in groups):  # last those that set what others have
        package = _package_of(path)
        content = {key: value for key, value in load_plain(path).items() if key != "defaults"}
        for key in flatten(content if package == EVERYTHING else {package: content}):
            option = "" if key.startswith("trainer.") else f" (of {path.parent.name}={path.stem})"  # always there
            if key.partition(".")[0] in {*settings, *groups}:
                known.setdefault(key, f"{key}{option}")
    return known


def _package_of(path: Path) -> str:
    """Return under which key Hydra puts the settings of a file in a group: as its first line says, or the group's."""
    line = path.read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix(HEADER) if line.startswith(HEADER) else path.parent.name

"""Errors of Hydra and OmegaConf reworded for a user who has mistyped something on the command line."""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hydra.errors import OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from rl_training.job.shipped import CONF, conf_folders
from rl_training.job.stored_settings import GONE


def explain(error: BaseException) -> str:
    """Returns what is wrong with the command line, and the fix; the message of an error of any other kind."""
    message = str(error)
    if isinstance(error, OverrideParseException):
        return _how_to_quote(error.override.removeprefix("++"))
    several = re.search(r"(?:Ambiguous value for argument|Sweep parameters) '(.*)'", message)
    if several:
        key, value = several.group(1).split("=", 1)
        return f"{several.group(1)}: one value is needed. For a list: '{key}=[{value}]'; or {quoted(key, value)}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is not set: give {error.full_key}=VALUE"
    choice = re.search(r"Could not find '(\w+)/([^']+)'", message)
    if choice:
        group, name = choice.groups()
        options = sorted({path.stem for folder in conf_folders() for path in (folder / group).glob("*.yaml")})
        return (
            f"{group}={name}: there is no such {group}. Choose from {', '.join(options)}{did_you_mean(name, options)}"
        )
    if isinstance(error, OmegaConfBaseException) and "is not in struct" in message:
        return f"{error.full_key} is missing: a run needs it, so it cannot be removed"
    if message.startswith("Config group override must be a string"):
        chosen = [arg for arg in sys.argv[1:] if arg.endswith("=null") and (CONF / arg.removesuffix("=null")).is_dir()]
        return f"{' '.join(chosen)}: give a name, see --help; for several groups it can be none"
    setting = re.search(r"Could not override '([^']+)'", message)
    if setting:
        return f"{setting.group(1)}: {_no_such_setting(setting.group(1))}"
    return message.split("\nSee http")[0]


def _how_to_quote(override: str) -> str:
    """Returns what to type for an override that Hydra's grammar cannot read: its value in double quotes."""
    key, equals, value = override.partition("=")
    if not equals:
        return f"{override}: a setting is KEY=VALUE, see --help"
    return f"{override}: signs like = ~ ( ) [ ] , {{ }} and letters outside of ASCII need quotes: {quoted(key, value)}"


def quoted(key: str, value: str) -> str:
    """Returns the word to type in a shell for a value that is to be taken as it stands."""
    value = re.sub(r'(\\*)"', r'\1\1\\"', value)  # a quote, and the backslashes before it, are escaped
    value = re.sub(r"(\\+)$", r"\1\1", value)  # so are those before the closing one
    return shlex.quote(f'{key}="{value}"')


def _no_such_setting(key: str) -> str:
    if key in GONE:
        return f"this setting is gone: {GONE[key]}"
    first, last = key.split(".")[0], key.split(".")[-1]
    probe = key.split(".")[1] if first == "probes" and key.count(".") == 2 else ""
    if probe and (CONF / "probe" / f"{probe}.yaml").is_file():
        options = [name for name in load_plain(CONF / "probe" / f"{probe}.yaml")[probe] if name != "_target_"]
        if last in options:
            return f"this run has no probe {probe}; choose it with probe={probe}, or in a list by probe=[…,{probe}]"
        return f"the probe has the options {', '.join(options)}{did_you_mean(last, options)}"
    if key.count(".") == 1 and (CONF / first).is_dir():
        by_file = {path.stem: _options(path, first) for path in sorted((CONF / first).glob("*.yaml"))}
        having = [f"{first}={name}" for name, options in by_file.items() if last in options]
        if having:
            return f"this run's choice of {first} has no such setting; {' and '.join(having)} would have it"
        known = sorted({option for options in by_file.values() for option in options})
        return f"{first} has the settings {', '.join(known)}{did_you_mean(last, known)}"
    groups = [path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra"]
    command = Path(sys.argv[0]).stem.replace("analyze", "offline")
    if not (CONF / f"{command}.yaml").is_file():
        command = "train"
    known = [name for name in (*load_plain(CONF / f"{command}.yaml"), *groups) if name not in ("defaults", "hydra")]
    return f"there is no such setting, see --help{did_you_mean(first, known)}"


def _options(path: Path, group: str) -> list[str]:
    """Returns the settings in a file of a group, which stand there under the group's name or without it."""
    content = load_plain(path)
    return [name for name in content.get(group, content) if name not in ("_target_", "defaults")]


def load_plain(path: Path) -> dict[str, Any]:
    """Returns the content of a file of conf/, unresolved."""
    return OmegaConf.to_container(OmegaConf.load(path))  # type: ignore[return-value]


def did_you_mean(name: str, options: Collection[str] | Mapping[str, str]) -> str:
    """Returns a hint at the option that is close to `name`; "" where none is.

    options  names; or what is said of each, by its name
    """
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    said = options if isinstance(options, Mapping) else {}
    return f"; did you mean {said.get(close[0], close[0])}?" if close else ""

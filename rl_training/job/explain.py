"""Mistakes in a configuration, each in one line that names key, value and fix: ours, and Hydra's in plain words."""

from __future__ import annotations

import difflib
import math
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from rl_training.errors import UserError
from rl_training.job.shipped import CONF, conf_folders

INTERVAL = re.compile(r"(list of )?(int|float) ([\[(])(\S+), (\S+)[\])]( or null)?(.*)")  # of ranges.yaml


def check_allowed(key: str, value: Any, allowed: str | Sequence[Any]) -> None:
    """Raises ValueError, with the hint, for a value that is none of these, or not in this interval of ranges.yaml.

    >>> check_allowed("top_p", 2.0, "float (0, 1] or null for the run's")
    Traceback (most recent call last):
    rl_training.errors.UserError: top_p=2.0 must be above 0 and at most 1, or null for the run's
    """
    if not isinstance(allowed, str):
        if value not in allowed:
            raise UserError(f"{key}={value}: choose from {', '.join(map(str, allowed))}")
        return
    interval = INTERVAL.fullmatch(allowed)
    assert interval, allowed
    in_list, kind, end, least, most, or_null, hint = interval.groups()
    hint = ", or null" * bool(or_null) + hint
    for number in value if in_list else (value,):
        if number is None and or_null:
            continue
        check_kind(key, number, 0 if kind == "int" else 0.0, hint)
        if not (float(least) < number if end == "(" else float(least) <= number) or number > float(most):
            at_most = "" if most == "inf" else f" and at most {float(most):.10g}"
            above = "above" if end == "(" else "at least"
            raise UserError(f"{key}={number} must be {above} {float(least):g}{at_most}{hint}")


def refuse_other_kinds(given: Mapping[Any, Any], standard: Mapping[Any, Any], prefix: str = "") -> None:
    """Raises ValueError for a value of another kind than the standard one: text for a number, a number for a list.

    Settings that are null, unset or absent in the standard may have any value. Settings that are text there may have
    any value but null, for their reader to check.
    """
    for key, default in standard.items():
        if key in given and default is not None:
            check_kind(f"{prefix}{key}", given[key], default)


def check_kind(key: str, value: Any, default: Any, hint: str = "") -> None:
    """Raises ValueError, with the hint, for a value of another kind than the default."""
    if isinstance(default, Mapping):
        if not isinstance(value, Mapping):
            raise UserError(f"{key}={value} must be a group of settings: {key}.NAME=VALUE")
        refuse_other_kinds(value, default, f"{key}.")
    elif isinstance(default, list | ListConfig):
        if not isinstance(value, list | ListConfig):
            raise UserError(f"{key}={value} must be a list: '{key}=[…]'")
        for element in value if default else ():
            check_kind(key, element, default[0], " in the list")
    elif isinstance(default, str):
        if value is None:
            raise UserError(f"{key}=null has no meaning: leave it out")
    elif isinstance(default, bool):
        if type(value) is not bool:
            raise UserError(f"{key}={value} must be true or false{hint}")
    elif type(value) is not int and (isinstance(default, int) or type(value) is not float):
        raise UserError(f"{key}={value} must be a {'whole ' * isinstance(default, int)}number{hint}")
    elif not math.isfinite(value):
        raise UserError(f"{key}={value} must be finite{hint}")


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the values of a nested configuration by their dotted keys."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=True)
    if not isinstance(node, Mapping):
        return {prefix.removesuffix("."): node}
    return {key: value for name in node for key, value in flat(node[name], f"{prefix}{name}.").items()}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns what is set otherwise now, by its keys; "" where nothing is."""
    changed = (key for key in sorted({*before, *now}) if before.get(key) != now.get(key))
    return ", ".join(f"{key}={now.get(key)!r} (was {before.get(key)!r})" for key in changed)


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


def choose_probes(names: str) -> str:
    """Returns what is said of `probes=NAMES`, the settings of probes, where `probe` would choose these."""
    return f"probes={names}: choose probes with 'probe={names}'; probes.NAME.OPTION=VALUE sets an option"


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


def quoted(key: str, value: str) -> str:
    """Returns the word to type in a shell for a value that is to be taken as it stands."""
    return shlex.quote(f"{key}={as_text(value)}")


def as_text(value: str) -> str:
    """Returns a text in double quotes, from which Hydra's grammar reads it as it stands."""
    value = re.sub(r'(\\*)"', r'\1\1\\"', value)  # a quote, and the backslashes before it, are escaped
    value = re.sub(r"(\\+)$", r"\1\1", value)  # so are those before the closing one
    return f'"{value}"'


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

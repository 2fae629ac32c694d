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
from rl_training.job.values import flat

GONE = {  # settings, and what to do instead
    "alert.within_steps": "it looks 20 steps ahead for a level in nats, give alert.below=0.05",
    "probes.simple.estimator": "'score' needs sixteen times the sequences, leave it out",
    "probes.gns.lags": "what persists of the gradient is no longer measured, leave it out",
    "probes.simple.draw": "it was not better than the first responses of each prompt, leave it out",
    "probes.simple.prompt_share": "fewer prompts were not better, leave it out",
    "probes.simple.split_error": "give probe=[simple,error_shares]",
    "probes.simple.top_responses": "give probe=[simple,responses] probes.responses.count=3",
    "probes.simple.validate_every": "give probe=[simple,ground_truth] probes.ground_truth.every=10",
    "probes.simple.validate_sequences": "give probe=[simple,ground_truth] probes.ground_truth.sequences=512",
    "probes.simple.seed": "give probe=[simple,ground_truth] probes.ground_truth.seed=0",
}


def explain(error: BaseException) -> str:
    """Returns what is wrong with the command line, and the fix; the message of an error of any other kind."""
    message = str(error)
    if isinstance(error, OverrideParseException):
        typed = error.override.removeprefix("++")
        key, equals, value = typed.partition("=")
        if not equals:
            return f"{typed}: a setting is KEY=VALUE, see --help"
        signs = "signs like = ~ ( ) [ ] , { } and letters outside of ASCII"
        return f"{typed}: {signs} need quotes: {quoted(key, value)}"
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


def quoted(key: str, value: str) -> str:
    """Returns the word to type in a shell for a value that is to be taken as it stands."""
    return shlex.quote(f"{key}={as_text(value)}")


def as_text(value: str) -> str:
    """Returns a text in double quotes, from which Hydra's grammar reads it as it stands."""
    value = re.sub(r'(\\*)"', r'\1\1\\"', value)  # a quote, and the backslashes before it, are escaped
    value = re.sub(r"(\\+)$", r"\1\1", value)  # so are those before the closing one
    return f'"{value}"'


def _no_such_setting(key: str) -> str:
    if key in GONE:
        return f"this setting is gone: {GONE[key]}"
    having: dict[str, list[str]] = {}  # by setting, what would have it: GROUP=OPTION
    for path in sorted(CONF.glob("*/*.yaml")):
        group, content = path.parent.name, load_plain(path)
        content = content.get(group, content)  # under the group's name or without it
        for name in flat({"probes" if group == "probe" else group: content}):
            having.setdefault(name, []).append(f"{group}={path.stem}")
    if key in having:
        return f"what this run has chosen lacks this setting; {' and '.join(having[key])} would have it"
    command = Path(sys.argv[0]).stem.replace("analyze", "offline")
    own = CONF / f"{command}.yaml" if command in ("offline", "evaluate") else CONF / "train.yaml"
    groups = [path.name for path in CONF.iterdir() if path.is_dir()]
    return f"there is no such setting, see --help{did_you_mean(key, [*flat(load_plain(own)), *having, *groups])}"


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

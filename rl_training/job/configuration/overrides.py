"""Overrides as typed on the command line, GROUP=OPTION or KEY=VALUE, and how they change the settings of a run."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf

from rl_training.errors import UserError
from rl_training.job.configuration.groups import CHANGEABLE, OPEN, SINGLE_OPTION
from rl_training.job.configuration.nested import flatten, load_plain
from rl_training.job.configuration.shipped import CONF
from rl_training.options import did_you_mean

# Settings of all commands that are a path, or a list of paths.
PATH_KEYS = ("run_dir", "resume", "branch", "data.path", "model.name", "model.folder", "run", "checkpoint",
             "checkpoints", "output", "runs_dir", "log.directory")  # fmt: skip


def root_key(word: str) -> str:
    """Return the first part of an override's key: "trainer" for ++trainer.max_steps=3, "" for --help."""
    return re.split(r"[.=@]", word.lstrip("+~"))[0] if "=" in word and not word.startswith("-") else ""


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(overrides))


def force_add(word: str) -> str:
    """Prefix KEY=VALUE with ++, so that Hydra accepts settings missing from conf/. Keep GROUP=OPTION unchanged."""
    is_plain = root_key(word) not in ("", "hydra") and word[0] not in "+~" and not (CONF / word.split("=")[0]).is_dir()
    return f"++{word}" if is_plain else word


def with_home(key: str, value: Any) -> Any:
    """Return a typed value of a setting, with `~` expanded if it is a path, or a list of paths.

    Not every shell expands `~` after `=`, and none after a dotted key. Unlike pathlib, os.path keeps a `~` that names
    no user. A stored `~` is the home of whoever stored it, so it is not expanded.
    """
    if key not in PATH_KEYS:
        return value
    if isinstance(value, list | ListConfig):
        return [with_home(key, path) for path in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def is_of_run(word: str) -> bool:
    """Return whether an override of an analysis is meant for its run: conf/offline.yaml does not define its key."""
    return root_key(word) not in {*settings_of_analyses(), "hydra", ""}


@functools.cache
def settings_of_analyses() -> Mapping[str, Any]:
    """Return the content of conf/offline.yaml."""
    return MappingProxyType(load_plain(CONF / "offline.yaml"))


def with_overrides(settings: DictConfig, overrides: Sequence[str], where: str) -> DictConfig:
    """Return settings with these overrides applied. GROUP=OPTION replaces the group's present option.

    `~` is expanded in paths that the overrides give, and in no others. An option with another `_target_` also applies
    what it sets elsewhere: data=gsm8k sets trainer.max_completion_length.

    Args:
        where: The run that has these settings, for messages.

    Raises:
        UserError: For a setting that does not exist or cannot be changed.
    """
    settings = settings.copy()
    changes = [change for change in parse_overrides(overrides) if not change.key_or_group.startswith("hydra")]
    for change in sorted(changes, key=lambda change: not (CONF / change.key_or_group).is_dir()):
        key = change.key_or_group
        value = cast("Any", change.value())
        if change.is_delete() or ((CONF / key).is_dir() and key not in CHANGEABLE):
            raise UserError(f"{change.input_line}: the settings are those of {where}; change single ones, KEY=VALUE")
        if key in CHANGEABLE:
            _apply_options(settings, key, [value] if isinstance(value, str) else value)
            continue
        group = key.partition(".")[0]
        is_open = group in OPEN and settings.get(group)
        if not is_open and OmegaConf.select(settings, key, default=...) is ...:
            hint = did_you_mean(key, [*flatten(settings), *flatten(settings_of_analyses())])
            raise UserError(f"{key}: there is no such setting, nor does {where} have it{hint}")
        OmegaConf.update(settings, key, with_home(key, value), merge=False, force_add=True)
    return settings


def _apply_options(settings: DictConfig, group: str, names: Sequence[str]) -> None:
    options = [OmegaConf.to_container(compose(f"{group}/{name}"), resolve=False) for name in names]
    chosen = cast("DictConfig", OmegaConf.merge(*options))
    node = CHANGEABLE[group]
    is_same = node in chosen and chosen[node].get("_target_") == settings.get(node, {}).get("_target_")
    if node in chosen:
        settings[node] = chosen.pop(node)
    if not is_same:
        settings.merge_with(chosen)


def refuse_several_options(overrides: Sequence[str]) -> None:
    """Raise UserError if several options are given for a group that takes exactly one: 'adapter=[lora,none]'."""
    for change in parse_overrides(overrides):
        options = cast("Any", change.value())
        if change.key_or_group in SINGLE_OPTION and isinstance(options, list) and len(options) > 1:
            raise UserError(
                f"{change.key_or_group}=[{','.join(map(str, options))}]: only one is possible, give "
                f"{change.key_or_group}=NAME"
            )

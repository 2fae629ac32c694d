"""Settings that lie in a folder, as a run's config.yaml, and the objects that settings describe.

A run may come from somebody else, and a `_target_` in its config.yaml can be any function of any library. So what is
read from a folder is inert: only what the files of conf/ make at a place can be made there, and everything else that
would run code or send something away is marked. A mark is refused where it would be used, in one line that says what to
type: what is named on this command line takes the place of the mark, and is made. Commands read the settings of a
folder here and nowhere else, and make objects of settings here and nowhere else.
"""

from __future__ import annotations

import functools
import io
import json
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_training.errors import UserError
from rl_training.job.configuration.nested import Keys, dotted, leaves, load_plain, with_texts
from rl_training.job.configuration.shipped import conf_folders
from rl_training.records.files.links import refuse_links_out
from rl_training.records.files.masking import without_masks
from rl_training.records.files.stored_yaml import plain_yaml
from rl_training.records.folder import CONFIG_FILE

MARK = "not named on this command line: "
PROVENANCE = "provenance"  # nothing is made of it: the command line there may hold any text
# By group of conf/, where what it makes lies in the settings of a run: under this key, or under a name in it.
PLACES = {"trainer": "trainer", "model": "model", "adapter": "adapter", "data": "data", "buffer": "buffer",
          "probe": "probes"}  # fmt: skip
OTHER_GROUPS = ("batch", "logger", "rollouts", PROVENANCE)
SPECIAL = {"_args_", "_partial_", "_recursive_", "_convert_"}  # keys with which hydra calls a target otherwise
INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")  # \${ is a text


def load_settings(path: Path) -> DictConfig:
    """Return what a file of settings holds, without secrets, which are masked there, with marks on what must be named.

    Raises:
        UserError: where it cannot be read, holds no settings, or holds what no run writes.
    """
    if path.name == CONFIG_FILE:
        refuse_links_out(path.parent)
    try:
        settings = OmegaConf.load(io.StringIO(plain_yaml(path)))
    except (yaml.YAMLError, OmegaConfBaseException, OSError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())}): mend or delete it") from error
    if not isinstance(settings, DictConfig) or not settings:
        raise UserError(f"{path} holds no settings: mend or delete it")
    plain: dict[Any, Any] = without_masks(OmegaConf.to_container(settings))
    for name in (*PLACES.values(), *OTHER_GROUPS):
        if not isinstance(plain.get(name) or {}, Mapping):
            raise UserError(f"{path}: {name}={plain[name]!s:.60} is no group of settings: mend or delete it")
    for keys, value in leaves(plain):
        # Hydra resolves what it makes twice, so that a text with \${ would be a reference the second time.
        is_made = keys[0] != PROVENANCE
        if isinstance(value, str) and ("${" in value if is_made else INTERPOLATION.search(value)):
            raise UserError(f"{path}: {dotted(keys)}={value} refers to something else: write the value itself")
    return OmegaConf.create(_marked(plain, (), path))


def literal(settings: Any) -> Any:
    """Escape settings so that a file of them is read as they stand: OmegaConf would take ${…} for a reference.

    >>> literal({"command": ["echo ${HOME}"]})
    {'command': ['echo \\\\${HOME}']}
    """
    return with_texts(settings, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def as_written(settings: Any) -> Any:
    """Remove the marks from settings: to compare or record them, not to make objects of them."""
    return with_texts(settings, lambda text: text.removeprefix(MARK))


def refuse_marked(settings: Mapping[Any, Any], *names: str) -> None:
    """Raise UserError, saying what to type, for a setting that must be named on this command line and is not.

    Args:
        names: of the settings that will be used, each with all that lies in it
    """
    plain: Any = OmegaConf.to_container(settings) if OmegaConf.is_config(settings) else settings
    for keys, value in leaves({name: plain.get(name) for name in names}):
        if isinstance(value, str) and value.startswith(MARK):
            named = value.removeprefix(MARK)
            typed = f"{dotted(keys)}={named}"
            if isinstance(keys[-1], int):  # of a list, which is typed whole
                within = as_written(functools.reduce(operator.getitem, keys[:-1], plain))
                typed = f"{dotted(keys[:-1])}=[{','.join(map(json.dumps, within))}]"
            raise UserError(
                f"{dotted(keys)}={named} stands in the settings of the run, and would run code or send something "
                f"away. If you trust whoever made the run, add to this command line: {shlex.quote(typed)}"
            )


def refuse_code_in(overrides: Iterable[str], path: Path) -> None:
    """Raise UserError for a word KEY=VALUE of a file that counts only on a command line."""
    for change in OverridesParser.create().parse_overrides(list(overrides)):
        keys = tuple(re.split(r"[.@]", change.key_or_group))
        for inner, value in leaves(change.value(), keys):
            if must_be_named(inner, value):
                raise UserError(
                    f"{path}: {dotted(inner)}={value} would run code or send something away, and a file is not your "
                    "command line: if you trust it, give it in Python, OfflineEntropyProbe({'overrides': [...], ...})"
                )


def names_code(name: str) -> bool:
    """Return whether the name of an intervention is a function in a file or module: see interventions/named.py.

    >>> names_code("my.py:softer"), names_code("my:softer:0.5"), names_code("bonus:0.02"), names_code("mis:0.5,2")
    (True, True, False, False)
    """
    place, _, rest = name.partition(":")
    return "." in place or rest.partition(":")[0].isidentifier()


# Beside `_target_`: settings of which some values run code or send something away, and which values do.
NAMED: dict[tuple[str, str], Callable[[Any], bool]] = {
    ("intervention", ""): lambda value: names_code(str(value)),
    ("probes", "which"): lambda value: names_code(str(value)),
    ("model", "attn_implementation"): lambda value: "/" in str(value),  # a kernel of the Hub: compiled code
    ("adapter", "megatron_config"): lambda value: value is not None,
    ("adapter", "megatron_core"): lambda value: value is not None,  # a module that PEFT imports
    ("trainer", "trust_remote_code"): bool,  # of a reference model, which TRL loads itself
    ("trainer", "model_init_kwargs"): lambda value: value is not None,
    ("trainer", "push_to_hub"): bool,
    ("trainer", "log_completions_hub_repo"): bool,
    ("trainer", "vllm_server_base_url"): bool,
    ("trainer", "vllm_server_host"): bool,
}


def must_be_named(keys: Keys, value: Any) -> bool:
    """Return whether a setting with these keys and this value counts only where it was typed."""
    if keys[-1] == "_target_":
        return value not in _shipped_targets(keys[:-1])
    return any(
        keys[0] == group and (not name or name in keys[1:3]) and tells(value) for (group, name), tells in NAMED.items()
    )


def _shipped_targets(place: Keys) -> frozenset[str]:
    """Return what files of conf/, or of --config-dir, make at this place."""
    depths = {"probes": 2}
    group = next((group for group, key in PLACES.items() if place[:1] == (key,)), None)
    if group is None or len(place) != depths.get(place[0], 1):
        return frozenset()
    return _targets_of(tuple(folder / group for folder in conf_folders()))


@functools.cache
def _targets_of(folders: tuple[Path, ...]) -> frozenset[str]:
    files = [path for folder in folders for path in folder.glob("*.yaml")]
    settings = [leaf for path in files for leaf in leaves(load_plain(path))]
    return frozenset(str(value) for keys, value in settings if keys[-1] == "_target_")


def _marked(node: Any, keys: Keys, path: Path) -> Any:
    """Return settings with a mark in front of each value that must be named.

    Raises:
        UserError: for what no run writes.
    """
    if isinstance(node, list):
        return [_marked(value, (*keys, number), path) for number, value in enumerate(node)]
    if not isinstance(node, Mapping):
        return f"{MARK}{node}" if must_be_named(keys, node) else node
    if not isinstance(node.get("_target_", ""), str):
        raise UserError(f"{path}: {dotted(keys)}._target_ is no name: mend or delete it")
    marked = {name: _marked(value, (*keys, name), path) for name, value in node.items()}
    is_inert = marked.get("_target_", "").startswith(MARK)  # its own maker may be called with them
    if (special := SPECIAL & marked.keys()) and not is_inert:
        raise UserError(f"{path}: {dotted(keys)}.{min(special)} would have an object made otherwise: remove it")
    return marked

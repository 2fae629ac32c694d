"""Reads settings stored in a folder, such as a run's config.yaml, so that nothing in them can run code.

A run may come from somebody else, and a `_target_` in its config.yaml can name any function of any library. So settings
read from a folder are inert: at each place, only the targets that conf/ (or --config-dir) uses at that place are
allowed. Every other value that would run code or send data somewhere is marked. Code that would use a marked value
refuses it with one line that says what to type: the same value on this command line replaces the mark, and is then
used. Commands read stored settings only here.
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
from rl_training.job.configuration.groups import KEY_OF, WITH_TARGET
from rl_training.job.configuration.nested import Keys, dotted_key, leaves, load_plain, map_strings
from rl_training.job.configuration.shipped import conf_folders
from rl_training.records.files.links import refuse_links_out
from rl_training.records.files.masking import without_masks
from rl_training.records.files.stored_yaml import plain_yaml
from rl_training.records.folder import CONFIG_FILE
from rl_training.records.hydra_text import quote_value

MARK = "not named on this command line: "  # prefix of a stored value that counts only if it is typed again
PROVENANCE = "provenance"  # no objects are made from it, so the command line in it may contain any text
NESTED_KEYS = (*KEY_OF.values(), "batch", "rollouts", PROVENANCE)  # settings that hold further settings
HYDRA_KEYS = {"_args_", "_partial_", "_recursive_", "_convert_"}  # keys that change how Hydra calls a target
INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")  # \${ is literal text


def load_settings(path: Path) -> DictConfig:
    """Return the settings in a file, without the secrets masked there, and with marks on values that must be typed.

    Raises:
        UserError: If the file cannot be read, contains no settings, or contains values that no run writes.
    """
    if path.name == CONFIG_FILE:
        refuse_links_out(path.parent)
    try:
        settings = OmegaConf.load(io.StringIO(plain_yaml(path)))
    except (yaml.YAMLError, OmegaConfBaseException, OSError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())}): fix or delete it") from error
    if not isinstance(settings, DictConfig) or not settings:
        raise UserError(f"{path} holds no settings: fix or delete it")
    plain: dict[Any, Any] = without_masks(OmegaConf.to_container(settings))
    for name in NESTED_KEYS:
        if not isinstance(plain.get(name) or {}, Mapping):
            raise UserError(f"{path}: {name}={plain[name]!s:.60} is not a group of settings: fix or delete it")
    for keys, value in leaves(plain):
        # Hydra resolves the settings of objects twice, so an escaped \${ would become a reference the second time.
        is_instantiated = keys[0] != PROVENANCE
        if isinstance(value, str) and ("${" in value if is_instantiated else INTERPOLATION.search(value)):
            raise UserError(f"{path}: {dotted_key(keys)}={value} refers to something else: write the value itself")
    return OmegaConf.create(_marked(plain, (), path))


def escape_interpolations(settings: Any) -> Any:
    r"""Escape ${…} in settings, which OmegaConf would take for a reference when it reads them from a file.

    >>> escape_interpolations({"command": ["echo ${HOME}"]})
    {'command': ['echo \\${HOME}']}
    """
    return map_strings(settings, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def unmarked(settings: Any) -> Any:
    """Remove the marks from settings, to compare or record them. Never make objects from the result."""
    return map_strings(settings, lambda text: text.removeprefix(MARK))


def refuse_marked(settings: Mapping[Any, Any], *names: str) -> None:
    """Raise UserError, which says what to type, for a marked setting: one that must be typed on this command line.

    Args:
        names: Top-level settings that will be used; everything below them is checked.
    """
    plain: Any = OmegaConf.to_container(settings) if OmegaConf.is_config(settings) else settings
    for keys, value in leaves({name: plain.get(name) for name in names}):
        if isinstance(value, str) and value.startswith(MARK):
            named = value.removeprefix(MARK)
            typed = f"{dotted_key(keys)}={named}"
            if isinstance(keys[-1], int):  # an element of a list, which must be typed whole
                within = unmarked(functools.reduce(operator.getitem, keys[:-1], plain))
                texts = [quote_value(name) if isinstance(name, str) else json.dumps(name) for name in within]
                typed = f"{dotted_key(keys[:-1])}=[{','.join(texts)}]"
            raise UserError(
                f"{dotted_key(keys)}={named} is in the settings of the run, and would run code or send data somewhere. "
                f"If you trust whoever made the run, add to this command line: {shlex.quote(typed)}"
            )


def refuse_code_in(overrides: Iterable[str], path: Path) -> None:
    """Raise UserError for an override in a file that is accepted only on the command line."""
    for change in OverridesParser.create().parse_overrides(list(overrides)):
        keys = tuple(re.split(r"[.@]", change.key_or_group))
        for inner, value in leaves(change.value(), keys):
            if must_be_typed(inner, value):
                raise UserError(
                    f"{path}: {dotted_key(inner)}={value} would run code or send data somewhere, and a file is "
                    "not your command line: if you trust it, give it in Python, "
                    "OfflineEntropyProbe({'overrides': [...], ...})"
                )


def names_code(name: str) -> bool:
    """Return whether the name of an intervention refers to a function in a file or module. See interventions/named.py.

    >>> names_code("my.py:softer"), names_code("my:softer:0.5"), names_code("bonus:0.02"), names_code("mis:0.5,2")
    (True, True, False, False)
    """
    place, _, rest = name.partition(":")
    return "." in place or rest.partition(":")[0].isidentifier()


# Settings other than `_target_` that can run code or send data somewhere, and the values for which they do.
DANGEROUS_SETTINGS: dict[tuple[str, str], Callable[[Any], bool]] = {
    ("intervention", ""): lambda value: names_code(str(value)),
    ("probes", "which"): lambda value: names_code(str(value)),
    ("model", "attn_implementation"): lambda value: "/" in str(value),  # a kernel of the Hub: compiled code
    ("adapter", "megatron_config"): lambda value: value is not None,
    ("adapter", "megatron_core"): lambda value: value is not None,  # a module that PEFT imports
    ("trainer", "trust_remote_code"): bool,  # for the reference model, which TRL loads itself
    ("trainer", "model_init_kwargs"): lambda value: value is not None,
    ("trainer", "push_to_hub"): bool,
    ("trainer", "log_completions_hub_repo"): bool,
    ("trainer", "vllm_server_base_url"): bool,
    ("trainer", "vllm_server_host"): bool,
}


def must_be_typed(keys: Keys, value: Any) -> bool:
    """Return whether a setting with these keys and this value is accepted only if it was typed."""
    if keys[-1] == "_target_":
        return value not in _shipped_targets(keys[:-1])
    return any(
        keys[0] == group and (not name or name in keys[1:3]) and is_dangerous(value)
        for (group, name), is_dangerous in DANGEROUS_SETTINGS.items()
    )


def _shipped_targets(place: Keys) -> frozenset[str]:
    """Return the targets that the files of conf/ and --config-dir use at this place of the settings."""
    depths = {"probes": 2}
    group = next((group for group, key in WITH_TARGET.items() if place[:1] == (key,)), None)
    if group is None or len(place) != depths.get(place[0], 1):
        return frozenset()
    return _targets_of(tuple(folder / group for folder in conf_folders()))


@functools.cache
def _targets_of(folders: tuple[Path, ...]) -> frozenset[str]:
    files = [path for folder in folders for path in folder.glob("*.yaml")]
    settings = [leaf for path in files for leaf in leaves(load_plain(path))]
    return frozenset(str(value) for keys, value in settings if keys[-1] == "_target_")


def _marked(node: Any, keys: Keys, path: Path) -> Any:
    """Return settings with a mark in front of each value that must be typed.

    Raises:
        UserError: For values that no run writes.
    """
    if isinstance(node, list):
        return [_marked(value, (*keys, number), path) for number, value in enumerate(node)]
    if not isinstance(node, Mapping):
        return f"{MARK}{node}" if must_be_typed(keys, node) else node
    if not isinstance(node.get("_target_", ""), str):
        raise UserError(f"{path}: {dotted_key(keys)}._target_ is not a name: fix or delete it")
    marked = {name: _marked(value, (*keys, name), path) for name, value in node.items()}
    is_inert = marked.get("_target_", "").startswith(MARK)  # a marked target may be called with them, once it is typed
    if (special := HYDRA_KEYS & marked.keys()) and not is_inert:
        raise UserError(f"{path}: {dotted_key(keys)}.{min(special)} changes how Hydra makes the object: remove it")
    return marked

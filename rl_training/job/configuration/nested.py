"""Nested settings: read them from conf/, iterate over them, flatten them to dotted keys and compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

Keys = tuple[Any, ...]  # from the outermost to the innermost


def load_plain(path: Path) -> dict[str, Any]:
    """Return the content of a file of conf/, with interpolations unresolved."""
    return OmegaConf.to_container(OmegaConf.load(path))  # type: ignore[return-value]


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested configuration, resolved, by dotted key."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=True)
    if not isinstance(node, Mapping):
        return {prefix.removesuffix("."): node}
    return {key: value for name in node for key, value in flatten(node[name], f"{prefix}{name}.").items()}


def describe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Name the settings that differ, each with both values; "" if none differ."""
    changed = (key for key in sorted({*before, *now}) if before.get(key) != now.get(key))
    return ", ".join(f"{key}={now.get(key)!r} (was {before.get(key)!r})" for key in changed)


def leaves(node: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield (keys, value) for each value of nested settings."""
    if isinstance(node, Mapping | list):
        for name, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from leaves(value, (*keys, name))
    else:
        yield keys, node


def dotted_key(keys: Keys) -> str:
    return ".".join(map(str, keys))


def map_strings(settings: Any, change: Callable[[str], str]) -> Any:
    """Return settings with `change` applied to each string value."""
    if isinstance(settings, Mapping):
        return {name: map_strings(value, change) for name, value in settings.items()}
    if isinstance(settings, list):
        return [map_strings(value, change) for value in settings]
    return change(settings) if isinstance(settings, str) else settings

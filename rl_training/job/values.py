"""The values of a configuration: checked one by one, compared, and made into objects.

Each mistake is an error that names the key, the value and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf


class Range(NamedTuple):
    """The numbers that mean something: from `least`, which is left out if `open`, to `most`."""

    kind: type
    least: float
    most: float = math.inf
    open: bool = False
    or_none: bool = False

    def check(self, key: str, value: Any, hint: str = "") -> None:
        """Raises ValueError, with the hint, for another value."""
        if value is None and self.or_none:
            return
        hint = f"{', or null' * self.or_none}{hint}"
        check_kind(key, value, self.kind(0), hint)
        if not (self.least < value if self.open else self.least <= value) or value > self.most:
            most = f" and at most {self.most:.10g}" if self.most < math.inf else ""
            raise ValueError(f"{key}={value} must be {'above' if self.open else 'at least'} {self.least:g}{most}{hint}")


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
            raise ValueError(f"{key}={value} must be a group of settings: {key}.NAME=VALUE")
        refuse_other_kinds(value, default, f"{key}.")
    elif isinstance(default, list | ListConfig):
        if not isinstance(value, list | ListConfig):
            raise ValueError(f"{key}={value} must be a list: '{key}=[…]'")
        for element in value if default else ():
            check_kind(key, element, default[0], " in the list")
    elif isinstance(default, str):
        if value is None:
            raise ValueError(f"{key}=null has no meaning: leave it out")
    elif isinstance(default, bool):
        if type(value) is not bool:
            raise ValueError(f"{key}={value} must be true or false{hint}")
    elif type(value) is not int and (isinstance(default, int) or type(value) is not float):
        raise ValueError(f"{key}={value} must be a {'whole ' * isinstance(default, int)}number{hint}")
    elif not math.isfinite(value):
        raise ValueError(f"{key}={value} must be finite{hint}")


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


def make(key: str, node: Mapping[str, Any], **values: Any) -> Any:
    """Returns what a node of the configuration describes. ValueError, naming the key, when it describes nothing."""
    try:
        return instantiate(node, _convert_="all", **values)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError | OSError) or (isinstance(cause, ImportError) and cause.name):
            raise cause from None  # of a maker's own, in its words
        raise ValueError(f"{key}: {' '.join(str(cause or error).split())}") from error

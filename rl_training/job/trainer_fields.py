"""What only TRL knows of cfg.trainer: which fields there are, and what kind of value each holds."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from typing import Any

from omegaconf import DictConfig

from rl_training.hosts.trl.trainer import DrGRPOConfig

KINDS = {"int": (int,), "float": (int, float), "bool": (bool,), "None": (type(None),)}


def check_fields(trainer: DictConfig) -> None:
    """Raises ValueError for a setting that DrGRPOConfig has not, and for one that is no number where it needs one."""
    fields = {field.name: field for field in dataclasses.fields(DrGRPOConfig) if field.init}
    for name, value in zip(map(str, trainer), trainer.values(), strict=True):
        if name in fields:
            _check_kind(f"trainer.{name}", fields[name].type, value)
        elif name != "_target_":
            close = difflib.get_close_matches(name, fields, n=3)
            hint = f"did you mean {' or '.join(f'trainer.{c}' for c in close)}?" if close else "see trl.GRPOConfig"
            raise ValueError(f"trainer.{name} is not a field of DrGRPOConfig: {hint}")


def _check_kind(key: str, annotation: Any, value: Any) -> None:
    names = re.findall(r"\w+", getattr(annotation, "__name__", str(annotation)))
    if not names or not set(names) <= KINDS.keys():
        return  # text, lists and what has a maker of its own
    if type(value) not in [kind for name in names for kind in KINDS[name]]:
        wanted = "true or false" if "bool" in names else f"a {'whole ' * ('float' not in names)}number"
        raise ValueError(f"{key}={value} must be {wanted}{', or null' * ('None' in names)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key}={value} must be finite")

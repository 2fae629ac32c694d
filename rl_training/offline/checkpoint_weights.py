"""Checks that a checkpoint's weights belong to this model: another adapter's would be ignored silently."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def _names_in(checkpoint: Path) -> set[str]:
    """Returns the names of the tensors in a checkpoint's weights; an adapter's only, where it is one."""
    index = checkpoint / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    for name in (ADAPTER_WEIGHTS, SAFE_WEIGHTS_NAME):
        if (checkpoint / name).is_file():
            with safe_open(checkpoint / name, framework="pt") as file:
                return set(file.keys())
    raise ValueError(f"{checkpoint} has no weights ({SAFE_WEIGHTS_NAME} or {ADAPTER_WEIGHTS})")


def refuse_other_weights(model: nn.Module, checkpoint: Path) -> None:
    """Raises ValueError where only one of model and checkpoint has an adapter, and where it holds other weights."""
    has_adapter, is_adapter = hasattr(model, "peft_config"), (checkpoint / ADAPTER_WEIGHTS).is_file()
    if has_adapter != is_adapter:
        way = "adapter=lora (or qlora)" if is_adapter else "adapter=none"
        raise ValueError(
            f"{checkpoint} holds {'an adapter' if is_adapter else 'all weights'}, and the model "
            f"{'has none' if is_adapter else 'has an adapter'}: use {way}"
        )
    if is_adapter:
        _refuse_other_rank(model, checkpoint)
        return
    names = set(model.state_dict())
    unknown = _names_in(checkpoint) - names
    if unknown:
        raise ValueError(
            f"{checkpoint} holds {some(unknown)}, which this model does not have: it was written for another model"
        )


def _refuse_other_rank(model: nn.Module, checkpoint: Path) -> None:
    """Raises ValueError where the adapter's shapes differ: PEFT would keep the fresh weights, with a warning."""
    shapes = {_without_adapter_name(name): param.shape for name, param in model.named_parameters()}
    with safe_open(checkpoint / ADAPTER_WEIGHTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118, it is not a dictionary
            found, expected = tuple(file.get_slice(name).get_shape()), shapes.get(name)
            if expected is not None and found != tuple(expected):
                raise ValueError(
                    f"{checkpoint}: {name} has the shape {found}, and this adapter {tuple(expected)}: set adapter.r "
                    "and adapter.target_modules as in its adapter_config.json"
                )


def refuse_frozen(parameters: Mapping[str, nn.Parameter], checkpoint: Path) -> None:
    if not parameters:
        raise ValueError(
            f"G1: no parameter is trainable after loading {checkpoint}: an adapter must be loaded with "
            "is_trainable=True, not merged, not disabled"
        )


def refuse_other_names(parameters: Mapping[str, nn.Parameter], checkpoint: Path) -> None:
    """Raises ValueError when what is trainable is not what the checkpoint holds: another adapter, or half of it."""
    stored, trained = _names_in(checkpoint), {_without_adapter_name(name) for name in parameters}
    if (checkpoint / ADAPTER_WEIGHTS).is_file() and stored - trained:
        raise ValueError(
            f"G2: {some(stored - trained)} of {ADAPTER_WEIGHTS} is not trainable: another adapter is active, or it is "
            "frozen"
        )
    if trained - stored:
        raise ValueError(
            f"G2: {some(trained - stored)} is trainable, and {checkpoint} does not hold it: set the adapter's "
            "target_modules, or the model, as the run had them"
        )


def _without_adapter_name(name: str) -> str:
    return name.replace(".default.", ".")


def some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first!r}" + (f" (and {len(others)} more)" if others else "")

"""Converts a state to named tensors, which a file can hold, and back.

A state is None, a tensor, a number, a ShardedVector, or a dataclass or mapping of such values. A tensor's name is its
path, such as `errors.variances`. The name of a sharded vector's slice also says which entries it holds. A state is read
back into a state of the same kind, so the tensors do not record classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.parallel.sharded_vector import ShardedVector, Slice

SHARD_PREFIX = "shard."  # name prefix of tensors that hold one rank's entries
ROOT_NAME = "value"  # name of a state that is a single tensor or number


def to_tensors(state: Any, path: str = "") -> dict[str, Tensor]:
    """Return the tensors of a state by name. Those of a sharded vector are in host memory.

    Args:
        state: The state.
        path: The path of the state within a larger one.

    Raises:
        UserError: A part of the state is of a kind that a state cannot contain.

    >>> to_tensors({"count": 2, "mean": torch.tensor([0.5])})
    {'count': tensor(2), 'mean': tensor([0.5000])}
    """
    if state is None:
        return {}
    if isinstance(state, Tensor):
        return {path or ROOT_NAME: state}
    if isinstance(state, bool | int | float):
        return {path or ROOT_NAME: torch.tensor(state, dtype=torch.float64 if isinstance(state, float) else None)}
    if isinstance(state, ShardedVector):
        parts = [(name, part) for name, slices in state.slices.items() for part in slices if part.start < part.stop]
        return {f"{SHARD_PREFIX}{part.start}.{part.stop}.{path}/{name}": part.entries[:].cpu() for name, part in parts}
    tensors: dict[str, Tensor] = {}
    for name, part in _parts(state, path).items():
        tensors |= to_tensors(part, _join_path(path, name))
    return tensors


def tensors_by_name(states: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each probe's state.

    Raises:
        UserError: A probe's state cannot be converted; the message names the probe.
    """
    tensors = {}
    for name, state in states.items():
        try:
            tensors[name] = to_tensors(state)
        except UserError as error:
            raise UserError(f"probe {name!r}: {error}") from error
    return tensors


def from_tensors(template: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `to_tensors` has converted.

    Args:
        template: A state of the same kind, such as a training's initial one. It determines the types. A mapping keeps
            its own entry if there are no tensors for it, and tensors for entries that it does not have are ignored. If
            a dimension of one of its tensors is 0, the tensor that is read may have any length there.
        tensors: The tensors by name.

    Raises:
        UserError: The tensors belong to another kind of state.
    """
    unread = dict(tensors)
    state = _read(template, "", unread)
    if unread:
        raise UserError(f"it also holds {', '.join(sorted(unread))}, which is unknown here")
    return state


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _parts(state: Any, path: str) -> Mapping[str, Any]:
    """Return the parts of a mapping or dataclass by name. Raise UserError if `state` is neither."""
    if isinstance(state, Mapping):
        for name in (name for name, part in state.items() if isinstance(part, Mapping)):
            if any(other.startswith(f"{name}.") for other in state):
                raise UserError(
                    f"a state has both a dictionary {name!r} and a name that begins with '{name}.': rename one of them"
                )
        return state
    if not dataclasses.is_dataclass(state):
        what = f"{path} is" if path else "it is"
        raise UserError(
            f"a state consists of tensors, numbers, and dataclasses or dictionaries of them, but {what} a "
            f"{type(state).__name__}"
        )
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def _read(template: Any, path: str, unread: dict[str, Tensor]) -> Any:
    """Return the state at a path, and remove its tensors from `unread`."""
    if template is None:
        return None
    if isinstance(template, Tensor | bool | int | float):
        tensor = _pop_tensor(path or ROOT_NAME, unread)
        if not isinstance(template, Tensor):
            if tensor.dim():
                raise UserError(f"{path or ROOT_NAME} has shape {tuple(tensor.shape)}, but must be a number")
            return type(template)(tensor.item())
        shape = template.shape
        if tensor.dim() != len(shape) or any(n not in (0, m) for n, m in zip(shape, tensor.shape, strict=True)):
            raise UserError(f"{path or ROOT_NAME} has shape {tuple(tensor.shape)}, not {tuple(shape)}")
        return tensor
    if isinstance(template, ShardedVector):
        return _read_vector(path, unread)
    parts = {}
    for name, part in _parts(template, path).items():
        path_of_part = _join_path(path, name)
        names = to_tensors(part, path_of_part).keys()
        is_absent = isinstance(template, Mapping) and bool(names) and names.isdisjoint(unread)
        parts[name] = part if is_absent else _read(part, path_of_part, unread)
    if isinstance(template, Mapping):
        for name in [name for name in unread if name.startswith(f"{path}." if path else "")]:
            del unread[name]
        return type(template)(parts)  # type: ignore[call-arg]
    return dataclasses.replace(template, **parts)


def _read_vector(path: str, unread: dict[str, Tensor]) -> ShardedVector:
    slices: dict[str, list[Slice]] = {}
    for key in [key for key in unread if key.startswith(SHARD_PREFIX)]:
        start, stop, path_of_part = key.removeprefix(SHARD_PREFIX).split(".", 2)
        if path_of_part.startswith(f"{path}/"):
            part = Slice(int(start), int(stop), unread.pop(key))
            slices.setdefault(path_of_part.removeprefix(f"{path}/"), []).append(part)
    return ShardedVector(slices)


def _pop_tensor(name: str, unread: dict[str, Tensor]) -> Tensor:
    if name not in unread:
        raise UserError(f"it lacks {name}")
    return unread.pop(name)

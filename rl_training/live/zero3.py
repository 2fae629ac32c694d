"""DeepSpeed's ZeRO stage 3, which cuts the weights too: whole again for a while, and read as zero.py reads the others.

Written against deepspeed 0.19; with zero.py the only file that names its internals. Here a parameter is empty wherever
no forward or backward needs it. While probes look at a step, and only then, every process holds all of them whole, as
TRL does to generate, and the engine's hooks, which would cut them again, are gone. Gradients and states come by the
optimizer's own getters, one all-gather for each parameter and quantity.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from trl.models.utils import add_hooks, remove_hooks

WHOLE: WeakSet[nn.Module] = WeakSet()  # models whose weights are whole just now


def is_gathered(model: nn.Module) -> bool:
    """Returns whether all parameters are whole, by `gathered`."""
    return model in WHOLE


@contextlib.contextmanager
def gathered(engine: Any) -> Iterator[None]:
    """A context in which every process has all parameters whole and no hook of the engine's cuts them. A collective."""
    import deepspeed

    model = engine.module
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        remove_hooks(engine)
        WHOLE.add(model)
        try:
            yield
        finally:
            WHOLE.discard(model)
            add_hooks(engine)


def mean_gradients(zero: Any, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Returns every parameter's gradient, averaged over ranks and not clipped; to be asked for before engine.step."""
    return {param: zero.get_fp32_grad_for_param(param) for param in parameters}


def optimizer_states(
    zero: Any, parameters: Iterable[nn.Parameter]
) -> tuple[dict[nn.Parameter, dict[str, Any]], dict[nn.Parameter, dict[str, Any]]]:
    """Returns the hyperparameters of every parameter's group, and its state; none of that before the first step."""
    group_of: dict[nn.Parameter, dict[str, Any]] = {}
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for param in parameters:
        group, _, _ = zero.grad_position[zero.get_param_id(param)]
        flat = zero.fp32_partitioned_groups_flat[group]
        group_of[param] = zero.optimizer.param_groups[zero.sub_group_to_group_id[group]]
        state = zero.optimizer.state.get(flat, {})
        if state:
            states[param] = {
                key: zero.get_full_hp_param(param, key) if _is_cut(value, flat) else value
                for key, value in state.items()
            }
    return group_of, states


def _is_cut(value: Any, flat: Tensor) -> bool:
    """Returns whether a state is of parameters' entries, and not the number of steps."""
    return isinstance(value, Tensor) and value.shape == flat.shape


def refuse_what_does_not_fit(model: nn.Module, parameters: Iterable[nn.Parameter], vectors: int) -> None:
    """Raises ValueError, with the memory it would take, where the whole weights and so many fp32 vectors do not fit.

    They are held against the memory of a process: its GPU's, or its share of the machine's.
    """
    weights = sum(_size(p) * p.element_size() for p in model.parameters())
    trained = 4 * vectors * sum(_size(p) for p in parameters)
    there = _bytes_of_a_process()
    if weights + trained > there:
        raise ValueError(
            f"under ZeRO-3 a measured step gathers all weights ({weights / 1e9:.1f} GB) and {vectors} fp32 vectors of "
            f"what is trained ({trained / 1e9:.1f} GB) on every process, which has {there / 1e9:.1f} GB: train an "
            "adapter (adapter=lora), have fewer folds (probes.simple.num_folds), or train without probes (probe=none)"
        )


def _size(param: nn.Parameter) -> int:
    return int(getattr(param, "ds_numel", param.numel()))


def _bytes_of_a_process() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes

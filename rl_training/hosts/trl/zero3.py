"""DeepSpeed's ZeRO stage 3, which cuts the weights too: whole again for a while, and read as zero.py reads the others.

Written against deepspeed 0.19; with zero.py the only file that names its internals. Here a parameter is empty wherever
no forward or backward needs it. While probes look at a step, and only then, every process holds all of them whole, as
TRL does to generate, and the engine's hooks, which would cut them again, are gone. Gradients and states come by the
optimizer's own getters, one all-gather for each parameter and quantity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from trl.models.utils import add_hooks, remove_hooks

from rl_training.engine.sharding import ByParameter, refuse_what_does_not_fit
from rl_training.hosts.trl.zero import Zero

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


class Zero3(Zero):
    """ZeRO stage 3."""

    KIND = "DeepSpeedZeroOptimizer_Stage3"

    def whole_weights(self) -> AbstractContextManager[None]:
        return gathered(self._engine)

    def mean_gradients(self, parameters: Iterable[nn.Parameter]) -> Mapping[nn.Parameter, Tensor | None]:
        return {param: self._zero.get_fp32_grad_for_param(param) for param in parameters}

    def optimizer_states(self, parameters: Iterable[nn.Parameter]) -> tuple[ByParameter, ByParameter]:
        zero = self._zero
        group_of: ByParameter = {}
        states: ByParameter = {}
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

    def refuse_what_does_not_fit(self, vectors: int) -> None:
        refuse_what_does_not_fit("ZeRO-3", self._engine.module, vectors, _size)


def _is_cut(value: Any, flat: Tensor) -> bool:
    """Returns whether a state is of parameters' entries, and not the number of steps."""
    return isinstance(value, Tensor) and value.shape == flat.shape


def _size(param: nn.Parameter) -> int:
    """Returns the number of entries of a parameter, also where it is cut, and empty."""
    return int(getattr(param, "ds_numel", param.numel()))

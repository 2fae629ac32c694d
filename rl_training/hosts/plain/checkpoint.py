"""The state of a plain loop, for its own checkpoints: tensors by name, which `torch.save` stores and loads safely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.parallel.state_tensors import from_tensors, tensors_by_name

LOOP = "measured_loop"  # key of what the loop itself stores, beside the states of probes under their names


def as_state(states: Mapping[str, Any], run_id: str) -> dict[str, dict[str, Tensor]]:
    """Return the states of the probes and the id of the training as tensors.

    Args:
        states: By the probe's name.
        run_id: "" if nothing is recorded: it is then left out.
    """
    of_loop = {LOOP: {"run_id": torch.tensor(list(run_id.encode()), dtype=torch.uint8)}} if run_id else {}
    return tensors_by_name(states) | of_loop


def from_state(state: Mapping[str, Mapping[str, Tensor]], initial: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the states of the probes and the id of the training, "" if it is unknown.

    Args:
        state: What `as_state` returned.
        initial: Initial states by the probe's name. States are loaded into the same types.

    Raises:
        UserError: If it belongs to other probes.
    """
    states = {name: tensors for name, tensors in state.items() if name != LOOP}
    if states.keys() != initial.keys():
        raise UserError(
            f"the state is of the probes {sorted(states)}, but the loop has {sorted(initial)}: use the same probes"
        )
    run_id = bytes(state[LOOP]["run_id"].tolist()).decode("ascii", "replace") if LOOP in state else ""
    return {name: from_tensors(like, states[name]) for name, like in initial.items()}, run_id

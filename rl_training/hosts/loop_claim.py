"""The folder that a loop writes its records to: locked, and never one that holds another training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.hosts.first_rank import on_first_rank
from rl_training.parallel.state_tensors import from_tensors, tensors_by_name
from rl_training.records.claim import RecordsClaim, numbers_of, run_id_in, split_logs
from rl_training.records.jsonl import Records

STATE = "measured_loop"  # key of the training's id among the states of probes


class LoopClaim:
    """Claims the folder of a loop's records, from the first step inside a `with` to the end of the `with`.

    Args:
        records: The records, on rank 0. None on other ranks, or where nothing is written.
        resumed_id: Id of the training that this one continues, from its checkpoint. "" if it is new or unknown.
    """

    def __init__(self, records: Records | None, resumed_id: str = "") -> None:
        self._claim = None if records is None else RecordsClaim(records)
        self._run_id = ""  # the same on every rank once training has begun
        self._loaded_id = resumed_id
        self._is_held = False

    @property
    def run_id(self) -> str:
        """The id of the training, the same on every rank. "" if it is not known yet."""
        return self._run_id or self._loaded_id

    def take(self, number: int, device: torch.device) -> None:
        """Claim the folder unless it is held. Collective at the first step inside a `with`.

        Args:
            number: The step that is about to begin. A number above 1 continues a training.
            device: Device for the communication.

        Raises:
            UserError: On all ranks, if the folder cannot be written to, or if it is unclear which folder is meant.
        """
        if self._is_held:
            return
        claim = self._claim
        self._run_id = on_first_rank(
            lambda: self._run_id if claim is None else claim.begin(self._wanted_id(claim, number)), device
        )
        self._is_held = True

    def _wanted_id(self, claim: RecordsClaim, number: int) -> str:
        """Return the id of the training that continues with this step, "" for a new one."""
        # `_run_id` is of an earlier `with` of this loop.
        if self._run_id or number == 1:
            return self._run_id
        return self._loaded_id or _id_of_named(claim)

    def release(self) -> None:
        """Unlock the folder."""
        self._is_held = False
        if self._claim is not None:
            self._claim.release()

    def state(self, probes: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """Return the states of the probes and the id of the training as tensors. There is no id without records."""
        run_id = torch.tensor(list(self.run_id.encode()), dtype=torch.uint8)
        claim = {STATE: {"run_id": run_id}} if self.run_id else {}
        return tensors_by_name(probes) | claim

    def load(self, state: Mapping[str, Mapping[str, Tensor]], initial: Mapping[str, Any]) -> dict[str, Any]:
        """Restore what `state` returned, and return the states of the probes.

        Args:
            state: What `state` returned.
            initial: Initial states by the probe's name. States are loaded into the same types.

        Raises:
            UserError: If it belongs to other probes.
        """
        states = {name: tensors for name, tensors in state.items() if name != STATE}
        if states.keys() != initial.keys():
            raise UserError(
                f"the state is of the probes {sorted(states)}, but the loop has {sorted(initial)}: use the same probes"
            )
        self._run_id = ""
        self._loaded_id = bytes(state[STATE]["run_id"].tolist()).decode("ascii", "replace") if STATE in state else ""
        return {name: from_tensors(like, states[name]) for name, like in initial.items()}


def _id_of_named(claim: RecordsClaim) -> str:
    """Return the id of the training in the folder that the user named, for a loop that resumes without a state.

    Raises:
        UserError: If folders with numbers hold trainings too, so that it could be any of them.
    """
    folder, logs = split_logs(claim.requested)
    folders = numbers_of(folder, logs)
    if len(folders) > 1:
        raise UserError(
            f"{', '.join(map(str, folders))} each hold a training, and nothing says which one this loop resumes: save "
            "measured.state_dict() in your checkpoint and give it to load_state_dict(...), or move the others away"
        )
    return run_id_in(claim.requested)

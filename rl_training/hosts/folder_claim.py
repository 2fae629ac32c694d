"""The folder that a loop writes its records to: locked, and never one that holds another training."""

from __future__ import annotations

import torch

from rl_training.errors import UserError
from rl_training.hosts.first_rank import on_first_rank
from rl_training.records.claim import RecordsClaim, numbers_of, run_id_in, split_logs
from rl_training.records.writer import Records


class FolderClaim:
    """Claims the folder of a loop's records, from `take` to `release`, or until the process ends.

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

    def resume(self, run_id: str) -> None:
        """Continue another training than before: the one with this id, or an unknown one if it is ""."""
        self._run_id, self._loaded_id = "", run_id

    def take(self, number: int, device: torch.device) -> None:
        """Claim the folder. Collective unless it is held already.

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
        # `_run_id` is of the time before the latest `release`.
        if self._run_id or number == 1:
            return self._run_id
        return self._loaded_id or _id_of_named(claim)

    def release(self) -> None:
        """Unlock the folder."""
        self._is_held = False
        if self._claim is not None:
            self._claim.release()


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

"""What each probe gets back of a checkpoint's states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_training.records.checkpoint_states import PROBE_STATES, load_probe_states


class Keeping:
    """Keeps what it is given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.got: dict[str, float] | None = None

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.got = {key: float(value) for key, value in state.items()}


def test_each_gets_what_stands_under_its_own_name_and_who_was_not_there_starts_afresh(tmp_path: Path) -> None:
    states = {"simple/sum.step": 10.0, "simple/error.mine": 12.0, "engine/update_step": 2.0}
    tensors = {key: torch.tensor(value) for key, value in states.items()}
    save_file(tensors, tmp_path / PROBE_STATES, {"probes": "simple,gns,engine"})
    keeping = [Keeping(name) for name in ("engine", "gns", "simple", "ground_truth")]
    load_probe_states(keeping, tmp_path)
    assert {of.name: of.got for of in keeping} == {
        "engine": {"update_step": 2.0}, "gns": {}, "simple": {"sum.step": 10.0, "error.mine": 12.0},
        "ground_truth": None,
    }  # fmt: skip

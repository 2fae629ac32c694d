"""Checkpoints in which the probe `simple` kept what the engine and other probes keep now are read as today's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_training.records.checkpoint_states import PROBE_STATES, load_probe_states

OLD = {  # every key that `simple` has ever written, a number each
    "update": 1.0, "update_step": 2.0, "error.squares": 3.0, "error.sum": 4.0, "error.weight": 5.0, "pairs": 6.0,
    "error_share.sum": 7.0, "error_share.weight": 8.0, "sum.predicted": 9.0, "sum.step": 10.0,
}  # fmt: skip
PRESENT = {  # by hand
    "engine": {"update": 1.0, "update_step": 2.0, "error.squares": 3.0, "error.sum": 4.0, "error.weight": 5.0},
    "ground_truth": {"pairs": 6.0},
    "simple": {"error_share.sum": 7.0, "error_share.weight": 8.0, "sum.predicted": 9.0, "sum.step": 10.0},
    "gns": {"history": 11.0},
}


class Keeping:
    """Keeps what it is given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.got: dict[str, float] | None = None

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.got = {key: float(value) for key, value in state.items()}


def loaded(folder: Path, probes: str, states: Mapping[str, float]) -> dict[str, dict[str, float] | None]:
    """Returns what each of today's probes gets of a checkpoint that holds these states; None where it starts afresh."""
    save_file({key: torch.tensor(value) for key, value in states.items()}, folder / PROBE_STATES, {"probes": probes})
    keeping = [Keeping(name) for name in PRESENT]
    load_probe_states(keeping, folder)
    return {of.name: of.got for of in keeping}


def test_what_simple_once_kept_goes_to_those_that_keep_it_now(tmp_path: Path) -> None:
    old = {f"simple/{key}": value for key, value in OLD.items()} | {"gns/history": 11.0}
    assert loaded(tmp_path, "simple,gns", old) == PRESENT


def test_states_that_are_written_today_are_read_under_their_own_names(tmp_path: Path) -> None:
    """Though `simple` had a key that begins as one of the old: nothing is moved where the engine has its own state."""
    now = {f"{name}/{key}": value for name, state in PRESENT.items() for key, value in state.items()}
    found = loaded(tmp_path, ",".join(PRESENT), now | {"simple/error.mine": 12.0})
    assert found == PRESENT | {"simple": {**PRESENT["simple"], "error.mine": 12.0}}


@pytest.mark.parametrize("probes", ["simple", "simple,gns"])
def test_who_had_no_state_then_starts_afresh_and_the_engine_with_none(tmp_path: Path, probes: str) -> None:
    """A checkpoint before the first measured step, or of a run that never measured the truth."""
    found = loaded(tmp_path, probes, {"simple/sum.step": 10.0})
    assert found["simple"] == {"sum.step": 10.0}
    assert found["engine"] == {}
    assert found["ground_truth"] is None

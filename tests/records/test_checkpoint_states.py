"""Each process writes its own entries into a checkpoint, and any number of processes can read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from foreign_runs import foreign_run
from safetensors.torch import save_file
from torch import nn

from rl_training.entropy.previous_update import UpdateState
from rl_training.errors import UserError
from rl_training.parallel.sharded_vector import ShardedVector
from rl_training.parallel.sharding import Shard
from rl_training.records.checkpoint_flaws import find_flaw
from rl_training.records.checkpoint_states import PROBE_STATES, load_probe_states, save_probe_states

UPDATE = {"weight.of.a": torch.arange(7.0), "b": torch.tensor([-1.0])}  # only the first process has an entry of b


class OneOf(Shard):
    """The shard of one of several processes."""

    def __init__(self, processes: int, rank: int) -> None:
        super().__init__(nn.Module(), torch.optim.SGD([torch.zeros(1)]), None)
        self.trained = self.optimized = {name: nn.Parameter(whole) for name, whole in UPDATE.items()}
        self.num_ranks, self.rank = processes, rank


def entries_of(processes: int, rank: int) -> dict[str, torch.Tensor]:
    shard = OneOf(processes, rank)
    return {name: whole[slice(*shard.entry_range(name, rank))] for name, whole in UPDATE.items()}


def write(checkpoint: Path, processes: int, rank: int) -> None:
    vector = ShardedVector.of(OneOf(processes, rank), entries_of(processes, rank))
    save_probe_states({"engine": UpdateState(vector, 4)}, checkpoint, processes, rank)


def read(checkpoint: Path, processes: int, rank: int) -> dict[str, torch.Tensor]:
    """Return the entries that a process reads."""
    state = load_probe_states({"engine": UpdateState()}, checkpoint)["engine"]
    assert state.step == 4
    return state.update.local(OneOf(processes, rank))


def assert_read_by(processes: int, checkpoint: Path) -> None:
    for rank in range(processes):
        expected = entries_of(processes, rank)
        states_read = read(checkpoint, processes, rank)
        assert [*states_read] == [*expected]
        assert all(torch.equal(states_read[name], expected[name]) for name in expected)


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("before", [1, 2, 4])
def test_an_update_saved_by_any_number_of_processes_is_read_by_any_number(
    tmp_path: Path, before: int, after: int
) -> None:
    for rank in range(before)[::-1]:  # the first process may write last
        write(tmp_path, before, rank)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        PROBE_STATES, *(f"probes_{rank}.safetensors" for rank in range(1, before))
    ]  # fmt: skip
    assert_read_by(after, tmp_path)


def test_states_that_a_checkpoint_lacks_are_named_in_one_line(tmp_path: Path, caplog) -> None:
    initial = {"simple": None, "gns": None, "engine": None}
    assert load_probe_states(initial, tmp_path) == initial
    assert caplog.messages == [f"{tmp_path} holds no state of these, which begin anew: simple, gns, engine"]


def test_a_missing_file_of_a_process_is_an_error(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, 2, rank)
    (tmp_path / "probes_1.safetensors").unlink()
    read(tmp_path, 2, 0)
    with pytest.raises(UserError, match=r"3 entries of weight\.of\.a"):
        read(tmp_path, 1, 0)


def test_leftover_files_of_an_earlier_larger_launch_are_not_read(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, 3, rank)
    (tmp_path / "probes_2.safetensors").write_bytes(b"of an earlier run")
    for rank in range(2):
        write(tmp_path, 2, rank)
    assert_read_by(1, tmp_path)


WRITTEN = {"probes": "simple", "num_processes": "1", "checksums": "{}"}


@pytest.mark.parametrize("changed", [
    {"num_processes": "9" * 9}, {"num_processes": "0"}, {"num_processes": "x"}, {"checksums": "[1]"},
    {"checksums": "{"}, {"checksums": "[" * 100_000}, {"checksums": '{"/proc/kcore": "0"}'},
])  # fmt: skip
def test_forged_metadata_of_probe_states_is_refused(tmp_path: Path, changed: dict[str, str]) -> None:
    """The number of processes decides how many files are looked for, and names decide which files are read."""
    checkpoint = foreign_run(tmp_path) / "training_state" / "checkpoint-1"
    save_file({"a": torch.zeros(1)}, checkpoint / PROBE_STATES, metadata=WRITTEN)
    assert not find_flaw(checkpoint)
    save_file({"a": torch.zeros(1)}, checkpoint / PROBE_STATES, metadata=WRITTEN | changed)
    assert f"{checkpoint / PROBE_STATES} does not hold the notes of a run" in find_flaw(checkpoint)


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"global_step": {}}', '{"global_step": "1"}', "[" * 100_000])
def test_a_checkpoint_without_a_step_counts_as_damaged(tmp_path: Path, text: str) -> None:
    checkpoint = foreign_run(tmp_path) / "training_state" / "checkpoint-1"
    (checkpoint / "trainer_state.json").write_text(text)
    assert find_flaw(checkpoint) == "its trainer_state.json is damaged"

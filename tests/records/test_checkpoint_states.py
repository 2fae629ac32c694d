"""What processes write into a checkpoint, each its own entries, is read by any number of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from foreign_runs import foreign_run
from safetensors.torch import save_file
from torch import nn

from rl_training.entropy.previous_update import PreviousUpdate
from rl_training.parallel.sharding import Shard
from rl_training.records.checkpoint_states import PROBE_STATES, load_probe_states, save_probe_states
from rl_training.records.checkpoints import find_flaw
from rl_training.step.data import EntropySettings

UPDATE = {"weight.of.a": torch.arange(7.0), "b": torch.tensor([-1.0])}  # of b, only the first process has an entry


class OneOf(Shard):
    """The shard of one of so many processes."""

    def __init__(self, processes: int, rank: int) -> None:
        super().__init__(nn.Module(), torch.optim.SGD([torch.zeros(1)]), None)
        self.trained = self.optimized = {name: nn.Parameter(whole) for name, whole in UPDATE.items()}
        self.num_ranks, self.rank = processes, rank


class History(PreviousUpdate):
    """That of one of several processes, under a name."""

    name = "engine"

    def __init__(self, processes: int, rank: int) -> None:
        shard = OneOf(processes, rank)
        self.own = {name: whole[slice(*shard.cut(name, rank))] for name, whole in UPDATE.items()}
        super().__init__(shard, EntropySettings())
        self.layout = shard.layout

    def keep_own(self) -> History:
        vector = self.layout.vector(self.own.values())
        self.keep(4, vector, vector)
        return self


def assert_read_by(processes: int, checkpoint: Path) -> None:
    for rank in range(processes):
        history = History(processes, rank)
        load_probe_states([history], checkpoint)
        update = history.before(5)
        assert update is not None
        for name, part in history.layout.by_name(update).items():
            assert torch.equal(part, history.own[name])


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("before", [1, 2, 4])
def test_any_number_of_processes_reads_the_entries_of_an_update_that_any_number_wrote(
    tmp_path: Path, before: int, after: int
) -> None:
    for rank in range(before)[::-1]:  # the first may be the last to write
        save_probe_states([History(before, rank).keep_own()], tmp_path, before, rank)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        PROBE_STATES, *(f"probes_{rank}.safetensors" for rank in range(1, before))
    ]  # fmt: skip
    assert_read_by(after, tmp_path)


def test_a_missing_file_of_a_process_is_an_error_and_not_a_part_of_an_update(tmp_path: Path) -> None:
    for rank in range(2):
        save_probe_states([History(2, rank).keep_own()], tmp_path, 2, rank)
    (tmp_path / "probes_1.safetensors").unlink()
    load_probe_states([History(2, 0)], tmp_path)
    with pytest.raises(ValueError, match=r"lacks 3 entries of weight.of.a: a process's file is missing"):
        load_probe_states([History(1, 0)], tmp_path)


def test_files_of_more_processes_that_wrote_earlier_are_not_read(tmp_path: Path) -> None:
    for rank in range(3):
        save_probe_states([History(3, rank).keep_own()], tmp_path, 3, rank)
    (tmp_path / "probes_2.safetensors").write_bytes(b"of an earlier run")
    for rank in range(2):
        save_probe_states([History(2, rank).keep_own()], tmp_path, 2, rank)
    assert_read_by(1, tmp_path)


WRITTEN = {"probes": "simple", "num_processes": "1", "checksums": "{}"}


@pytest.mark.parametrize("changed", [
    {"num_processes": "9" * 9}, {"num_processes": "0"}, {"num_processes": "x"}, {"checksums": "[1]"},
    {"checksums": "{"}, {"checksums": "[" * 100_000}, {"checksums": '{"/proc/kcore": "0"}'},
])  # fmt: skip
def test_notes_that_no_run_writes_are_neither_followed_nor_counted(tmp_path: Path, changed: dict[str, str]) -> None:
    """A number of processes is a number of files that are looked for, and a name is of a file that is read."""
    checkpoint = foreign_run(tmp_path) / "training_state" / "checkpoint-1"
    save_file({"a": torch.zeros(1)}, checkpoint / PROBE_STATES, metadata=WRITTEN)
    assert not find_flaw(checkpoint)
    save_file({"a": torch.zeros(1)}, checkpoint / PROBE_STATES, metadata=WRITTEN | changed)
    assert f"{checkpoint / PROBE_STATES} holds other notes than a run writes" in find_flaw(checkpoint)


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"global_step": {}}', '{"global_step": "1"}', "[" * 100_000])
def test_a_checkpoint_that_does_not_say_its_step_is_damaged(tmp_path: Path, text: str) -> None:
    checkpoint = foreign_run(tmp_path) / "training_state" / "checkpoint-1"
    (checkpoint / "trainer_state.json").write_text(text)
    assert find_flaw(checkpoint) == "its trainer_state.json is damaged"

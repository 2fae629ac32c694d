"""Two plain loops never write into one folder, and a loop that resumes finds its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist
from plain_loop import loss_of, microbatches, scores_of
from shared_rollouts import MICROBATCH, G

from rl_training import EffectiveSampleSizeProbe, Records, UserError, measured_loop
from rl_training.hosts.first_rank import on_first_rank
from rl_training.hosts.plain.calls import MeasuredLoop
from rl_training.models.load import load_tiny
from rl_training.records.claim import RUN_ID_FILE
from rl_training.records.compare.groups import differences, read_groups
from rl_training.records.jsonl import read_estimates, read_metrics


class Loop:
    """A training of one microbatch a step."""

    def __init__(self, records: Any, target_kl_share: float | None = None) -> None:
        self.model = load_tiny()[0].train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.measured: MeasuredLoop = measured_loop(
            self.model, self.optimizer, EffectiveSampleSizeProbe(), responses_per_prompt=G, microbatch_size=MICROBATCH,
            microbatches=1, records=records, target_kl_share=target_kl_share,
        )  # fmt: skip

    def step(self, number: int, reward: float = 0.0) -> None:
        with self.measured.step(number) as metrics:
            part = microbatches(number)[0]
            logps, entropies = scores_of(self.model, part)
            self.measured.microbatch(part, logps, entropies)
            loss_of(logps, part, 1).backward()
            self.measured.gradients_ready()
            metrics["mine"] = reward
            self.optimizer.step()

    def train(self, first: int, last: int, reward: float = 0.0) -> None:
        with self.measured:
            for number in range(first, last + 1):
                self.step(number, reward)


def mine(logs: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["mine"]) for row in read_metrics(logs)]


def test_a_second_start_writes_to_the_next_free_number_and_says_so(tmp_path: Path, caplog) -> None:
    """A script that is started again. Whether the folder is given by its name or as `Records`."""
    logs = tmp_path / "run" / "logs"
    for reward, records in ((1.0, logs), (2.0, str(logs)), (3.0, Records(logs))):
        Loop(records).train(1, 2, reward)
    for number, reward in (("", 1.0), ("-2", 2.0), ("-3", 3.0)):
        assert mine(tmp_path / f"run{number}" / "logs") == [(1, reward), (2, reward)]
        assert {row["step"] for row in read_estimates(tmp_path / f"run{number}" / "logs")} == {1, 2}
    assert f"{tmp_path / 'run'} holds another training, so this one is written to {tmp_path / 'run-3'}" in caplog.text
    Loop(tmp_path / "bare").train(1, 1, 4.0)
    Loop(tmp_path / "bare").train(1, 1, 5.0)
    assert (mine(tmp_path / "bare"), mine(tmp_path / "bare-2")) == ([(1, 4.0)], [(1, 5.0)])


def test_two_loops_at_the_same_time_never_interleave(tmp_path: Path) -> None:
    """The second starts before the first has written a line. It has bounded steps, and so is no repeat of the first."""
    first, second = (Loop(tmp_path / "run" / "logs", share) for share in (None, 1e-3))
    with first.measured, second.measured:
        with pytest.raises(ZeroDivisionError), first.measured.step(1):
            raise ZeroDivisionError
        second.step(1, 2.0)
        for number in (1, 2):
            first.step(number, 1.0)
        second.step(2, 2.0)
    assert mine(tmp_path / "run" / "logs") == [(1, 1.0), (2, 1.0)]
    assert mine(tmp_path / "run-2" / "logs") == [(1, 2.0), (2, 2.0)]
    groups = read_groups([tmp_path / "run", tmp_path / "run-2"])
    assert differences(groups) == {"target_kl_share": ["none", "0.001"]}


def test_a_loop_that_resumes_continues_in_its_own_folder_whatever_else_lies_beside_it(tmp_path: Path, caplog) -> None:
    logs = tmp_path / "run" / "logs"
    Loop(logs).train(1, 3, 1.0)
    (logs / RUN_ID_FILE).unlink()  # a training without an id is no other one's
    Loop(logs).train(1, 1, 2.0)
    own = Loop(logs)
    own.train(1, 3, 3.0)
    state = own.measured.state_dict()
    own.train(4, 4, 3.0)  # in another `with`
    assert mine(tmp_path / "run-3" / "logs") == [(1, 3.0), (2, 3.0), (3, 3.0), (4, 3.0)]
    own.measured.load_state_dict(state)  # the same loop goes back
    own.train(4, 5, 3.5)
    assert mine(tmp_path / "run-3" / "logs") == [(1, 3.0), (2, 3.0), (3, 3.0), (4, 3.5), (5, 3.5)]
    resumed = Loop(logs)
    resumed.measured.load_state_dict(state)
    saved_again = resumed.measured.state_dict()["measured_loop"]["run_id"]  # before its first step
    assert torch.equal(saved_again, state["measured_loop"]["run_id"])
    resumed.train(4, 5, 4.0)
    assert mine(tmp_path / "run-3" / "logs") == [(1, 3.0), (2, 3.0), (3, 3.0), (4, 4.0), (5, 4.0)]
    unknown = Loop(logs)
    with unknown.measured, pytest.raises(ValueError, match=r"/run, .*/run-2, .* load_state_dict\("):
        unknown.step(4)
    assert mine(logs) == [(1, 1.0), (2, 1.0), (3, 1.0)]


def test_a_loop_that_resumes_without_a_state_continues_in_the_only_folder_there_is(tmp_path: Path) -> None:
    Loop(tmp_path / "run" / "logs").train(1, 3, 1.0)
    Loop(tmp_path / "run" / "logs").train(3, 4, 2.0)
    assert mine(tmp_path / "run" / "logs") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def of_two(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo")
    for number, name in enumerate(("run", "run-2"), start=1):
        loop = Loop(folder / "run" / "logs" if rank == 0 else None)
        loop.train(1, 2, float(number))
        state = loop.measured.state_dict()
        assert len(state["measured_loop"]["run_id"]) == 16  # on every rank
        if rank == 0:
            assert mine(folder / name / "logs") == [(1, float(number)), (2, float(number))]
    Loop(folder / "run" / "logs" if rank == 0 else None).train(1, 1)  # run-3
    unknown = Loop(folder / "run" / "logs" if rank == 0 else None)
    with unknown.measured, pytest.raises(ValueError, match=r"/run, .*/run-2, .* load_state_dict\("):
        unknown.step(2)
    for error, on_others in ((UserError, UserError), (PermissionError, RuntimeError)):
        with pytest.raises(error if rank == 0 else on_others, match="no room") as raised:
            on_first_rank(lambda error=error: fail(error), torch.device("cpu"))
        assert rank == 0 or error is UserError or "PermissionError" in str(raised.value)


def fail(error: type[Exception]) -> None:
    raise error("no room")


def test_with_several_processes_all_know_the_training_and_all_end_where_the_first_cannot_write(tmp_path: Path) -> None:
    forks.start_ranks(of_two, (tmp_path,), 2)

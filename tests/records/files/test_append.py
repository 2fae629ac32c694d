"""Lines stay whole: a full disk appends nothing of a step, and what a kill has cut off does not harm the next step."""

from __future__ import annotations

from pathlib import Path

import forks
import pytest
from full_disk import files_of_at_most

from rl_training.errors import UserError
from rl_training.records.files.append import MAX_LINE_BYTES
from rl_training.records.jsonl import METRICS_FILE, iterate_rollouts, read_metrics
from rl_training.records.writer import Records

STEPS = range(1, 4)


def write(folder: Path, *steps: int) -> None:
    for step in steps:
        Records(folder).write_metrics(step, {"reward": 0.5})


def steps_in(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder)]


def written_on_a_disk_that_fills_up(folder: Path) -> None:
    records = Records(folder, rollouts_every=1)
    write(folder, *STEPS)
    records.write_rollouts(1, [{"response": "1"}])
    for name, append in (
        (METRICS_FILE, lambda: records.write_metrics(4, {"reward": 0.5})),
        ("rollouts.jsonl.gz", lambda: records.write_rollouts(2, [{"response": "2"}])),
    ):
        before = (folder / name).read_bytes()
        with files_of_at_most(len(before) + 9), pytest.raises(UserError, match=str(folder / name)):
            append()
        assert (folder / name).read_bytes() == before
        append()
    assert steps_in(folder) == [1, 2, 3, 4]
    assert [row["step"] for row in iterate_rollouts(folder)] == [1, 2]


def test_a_full_disk_appends_nothing_of_a_step_and_the_next_step_is_read(tmp_path: Path) -> None:
    forks.in_fork(written_on_a_disk_that_fills_up, tmp_path)


@pytest.mark.parametrize("long", [0, 100_000])
def test_a_line_that_a_kill_has_cut_off_does_not_harm_the_next_step(tmp_path: Path, long: int) -> None:
    write(tmp_path, *STEPS)
    with open(tmp_path / METRICS_FILE, "a", encoding="utf-8") as file:
        file.write('{"step": 4, "note": "' + "a" * long)
    write(tmp_path, 4, 5)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]


def test_nothing_is_appended_to_a_last_line_longer_than_any_record(tmp_path: Path) -> None:
    """Where it begins is not looked for, so that it can be neither kept whole nor removed."""
    write(tmp_path, 1)
    with open(tmp_path / METRICS_FILE, "ab") as file:
        file.write(b"x" * (MAX_LINE_BYTES + (1 << 20)))
    before = (tmp_path / METRICS_FILE).stat().st_size
    with pytest.raises(UserError, match=r"metrics\.jsonl: .*16 MiB"):
        write(tmp_path, 2)
    assert (tmp_path / METRICS_FILE).stat().st_size == before


def test_a_first_line_that_a_kill_has_cut_off_is_removed(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 1, "rew')
    write(tmp_path, 1)
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize("long", [0, 200_000])  # the second is read in several blocks
def test_a_last_line_without_its_break_is_read_and_the_next_step_begins_a_new_line(tmp_path: Path, long: int) -> None:
    write(tmp_path, 1, 2)
    Records(tmp_path).write_metrics(3, {"note": "a" * long})
    file = tmp_path / METRICS_FILE
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    assert steps_in(tmp_path) == [1, 2, 3]
    write(tmp_path, 4)
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    Records(tmp_path).start(after_step=4)
    assert steps_in(tmp_path) == [1, 2, 3, 4]

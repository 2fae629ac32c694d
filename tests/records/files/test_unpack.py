"""Damaged and hostile record files: no row is lost silently, and no more memory is used than a line needs."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path

import pytest

from rl_training.records.analyses import read_probe_log
from rl_training.records.files.unpack import MAX_LINE_BYTES, whole_lines
from rl_training.records.jsonl import METRICS_FILE, ROLLOUTS_FILE, iterate_rollouts, read_metrics
from rl_training.records.writer import Records

NUM_STEPS = 6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a file of rollouts: for each step a gzip member with two rows."""
    records, rng = Records(tmp_path), random.Random(0)
    for step in range(1, NUM_STEPS + 1):
        rows = [{"response": "".join(rng.choices("abcdé\n", k=60)), "reward": rng.random()} for _ in range(2)]
        records.write_rollouts(step, rows)
    return tmp_path / ROLLOUTS_FILE


def member_starts(content: bytes) -> list[int]:
    starts = [start for start in range(len(content)) if content[start:].startswith(b"\x1f\x8b\x08\x00")]
    assert len(starts) == NUM_STEPS
    return starts


def rows_of(path: Path) -> list[dict[str, object]]:
    return list(iterate_rollouts(path.parent))


def test_damage_before_the_last_gzip_member_is_an_error_and_resuming_rewrites_nothing(path: Path) -> None:
    whole = path.read_bytes()
    start, following = member_starts(whole)[1:3]
    path.write_bytes(whole[: start + 30] + b"?" * 20 + whole[start + 50 :])
    damaged = path.read_bytes()
    with pytest.raises(ValueError, match=rf"rollouts\.jsonl\.gz .*\b{start}\b.*\b{following}\b.*copy"):
        rows_of(path)
    with pytest.raises(ValueError, match=rf"rollouts\.jsonl\.gz .*\b{start}\b.*\b{following}\b"):
        Records(path.parent).start(after_step=NUM_STEPS)
    assert path.read_bytes() == damaged


def test_a_log_cut_at_any_byte_is_read_up_to_there_with_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, rows = path.read_bytes(), rows_of(path)
    starts = [*member_starts(whole), len(whole)]
    for cut in sorted({*range(0, len(whole), 7), *starts, *(start + 1 for start in starts[:-1])}):
        caplog.clear()
        path.write_bytes(whole[:cut])
        rows_read = rows_of(path)
        num_whole = sum(end <= cut for end in starts[1:])
        assert rows_read == rows[: len(rows_read)]
        assert 2 * num_whole <= len(rows_read) <= 2 * num_whole + 2
        assert len(caplog.records) == (cut not in starts), cut


def test_no_changed_byte_loses_a_row_silently(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, rows = path.read_bytes(), rows_of(path)
    last = member_starts(whole)[-1]
    num_errors = 0
    for place in range(0, len(whole), 5):
        caplog.clear()
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            rows_read = rows_of(path)
        except ValueError:
            num_errors += 1
            continue
        assert rows_read == rows or (caplog.records and place >= last), place  # the time in a header does not matter
    assert num_errors > 0.8 * last / 5


def test_a_resumed_run_keeps_one_gzip_member_per_step(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = rows_of(path)
    path.write_bytes(path.read_bytes()[:-5])
    Records(path.parent).start(after_step=NUM_STEPS)
    assert any("its end, from byte" in record.getMessage() for record in caplog.records)
    caplog.clear()
    assert rows_of(path) in (rows, rows[:-1], rows[:-2])
    assert not caplog.records
    assert path.read_bytes().count(b"\x1f\x8b\x08\x00") >= NUM_STEPS - 1


@pytest.mark.parametrize("name", [ROLLOUTS_FILE, METRICS_FILE])
def test_a_line_of_300_megabytes_is_refused_after_a_few(tmp_path: Path, name: str) -> None:
    ten = b"x" * 10_000_000
    packed = name.endswith(".gz")
    lines = [json.dumps({"step": step, "reward": 1.0}).encode() + b"\n" for step in (1, 2)]
    with open(tmp_path / name, "wb") as file:
        for part in [*lines, *([gzip.compress(ten)] * 30 if packed else [ten] * 30)]:
            file.write(gzip.compress(part) if packed and part in lines else part)
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"{name}, line 3 .*16 MiB"):
        list(iterate_rollouts(tmp_path) if packed else read_metrics(tmp_path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * MAX_LINE_BYTES


def test_whole_lines_equal_those_of_a_plain_reader_without_an_unfinished_one(tmp_path: Path) -> None:
    rng = random.Random(0)
    text = "".join(rng.choice(["é", "\r", "\n", "\n\n", "b" * 1000, "\u2028"]) for _ in range(5000)).encode()
    for name, content in (("a.jsonl", text), ("a.jsonl.gz", gzip.compress(text[:999]) + gzip.compress(text[999:]))):
        (tmp_path / name).write_bytes(content)
        assert list(whole_lines(tmp_path / name)) == text.split(b"\n")[:-1]
    (tmp_path / "empty.jsonl.gz").write_bytes(b"")
    assert list(whole_lines(tmp_path / "empty.jsonl.gz")) == []


def test_a_decompression_bomb_or_truncated_log_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "entropy_probe_step_1.json.gz"
    log.write_bytes(b"".join(gzip.compress(b" " * 10**6) for _ in range(3))[:-9])
    with pytest.raises(ValueError, match=log.name):
        read_probe_log(log)
    log.write_bytes(gzip.compress(b'{"timing": {}}')[:-9])
    with pytest.raises(ValueError, match=log.name):
        read_probe_log(log)
    with pytest.raises(FileNotFoundError):
        read_probe_log(tmp_path / "none.json.gz")


def test_a_log_larger_than_its_limit_is_refused_with_the_way_to_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_training.records.files.unpack.MAX_BYTES", 1 << 20)
    log = tmp_path / "entropy_probe_step_1.json.gz"
    log.write_bytes(gzip.compress(b" " * (1 << 21)))
    with pytest.raises(ValueError, match=rf"{log.name} .*1 MiB.*gunzip"):
        read_probe_log(log)

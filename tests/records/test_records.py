"""Records are flat lines that survive a kill, and after a resume no step is duplicated or missing."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_training import Estimate
from rl_training.records import checkpoint_states
from rl_training.records.jsonl import METRICS_FILE, PROBES_FILE, iterate_rollouts, read_estimates, read_metrics
from rl_training.records.writer import Records
from rl_training.statistics.unavailable import Unavailable


def write_steps(records: Records, steps: range) -> None:
    for step in steps:
        records.write_metrics(step, {"loss": 0.1 * step})
        records.write_estimates(step, 2, "probe", {"a/b": Estimate(1.0, 0.5, 8, about_step=step - 1)})


def test_a_resumed_run_drops_the_lines_of_repeated_steps_with_a_warning(tmp_path, caplog) -> None:
    write_steps(Records(tmp_path), range(1, 6))
    again = Records(tmp_path)
    again.start(after_step=3)
    assert [f"{name}: 2 lines of steps after 3 are dropped" in caplog.text for name in (METRICS_FILE, PROBES_FILE)] == [
        True
    ] * 2
    write_steps(again, range(4, 7))
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in read_estimates(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_resuming_keeps_only_a_few_record_lines_in_memory(tmp_path: Path) -> None:
    """They are read in chunks of one mebibyte."""
    records, text = Records(tmp_path, rollouts_every=1), "a response " * 1000
    for step in range(1, 2001):
        records.write_metrics(step, {"text": text})
        records.write_rollouts(step, [{"response": text}])
    tracemalloc.start()
    records.start(after_step=1999)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "metrics.jsonl").stat().st_size > 2e7
    assert peak < 7e6
    assert [line["step"] for line in read_metrics(tmp_path)] == [*range(1, 2000)]
    assert sum(1 for _ in iterate_rollouts(tmp_path)) == 1999


def test_numbers_of_numpy_and_torch_are_recorded_as_pythons_own(tmp_path: Path) -> None:
    """A loop's metrics and a probe of one's own come as what its library computes."""
    records = Records(tmp_path)
    numbers = {"a": np.float32(0.5), "b": np.int64(3), "c": torch.tensor([math.nan]), "d": {"e": [np.float64("inf")]}}
    records.write_metrics(1, numbers)
    records.write_estimates(1, 1, "probe", {"x": Estimate(torch.tensor(0.25), np.float32(0.5), np.int64(8))})
    records.write_estimates(2, 1, "probe", {"x": Estimate(0.25, 0.5, np.float64(8.0))})  # a count that was divided
    (line,) = (json.loads(text) for text in (tmp_path / METRICS_FILE).read_text("utf-8").splitlines())
    assert line == {"step": 1, "a": 0.5, "b": 3, "c": None, "d": {"e": ["inf"]}}
    for x in read_estimates(tmp_path):
        assert (x["value"], x["stderr"], x["num_samples"]) == (0.25, 0.5, 8)


def test_a_line_cut_short_by_a_kill_is_ignored(tmp_path: Path) -> None:
    records = Records(tmp_path)
    write_steps(records, range(1, 3))
    with open(tmp_path / METRICS_FILE, "a", encoding="utf-8") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    records.start(after_step=2)
    write_steps(records, range(3, 4))
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]


def test_an_estimate_keeps_all_its_fields_and_is_about_its_own_step_by_default(tmp_path: Path) -> None:
    records = Records(tmp_path)
    missing = {
        "y": Estimate.missing("why"),
        "z": Estimate.missing(Unavailable("other_loss", "its loss", fix="another")),
    }
    records.write_estimates(7, 2, "probe", {"x": Estimate(-0.25, 0.5, 8, about_step=6), **missing})
    x, y, z = read_estimates(tmp_path)
    assert x == {
        "step": 7, "about_step": 6, "world_size": 2, "probe": "probe", "name": "x",
        "value": -0.25, "stderr": 0.5, "num_samples": 8, "reason": "",
    }  # fmt: skip
    assert math.isnan(y["value"])
    assert (y["about_step"], y["reason"]) == (7, "why")
    assert (z["reason"], z["code"]) == ("its loss: another", "other_loss")
    assert "code" not in y


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "is damaged"),
        ('{"loss": 0.1}', "has no `step`"),
        ("[2]", "has no `step`"),
        ('{"step": 2, "name": "\xff"}', "is damaged"),
    ],
)
@pytest.mark.parametrize("name", [METRICS_FILE, PROBES_FILE])
def test_a_malformed_line_is_named_with_its_file_and_number_and_nothing_is_lost(
    tmp_path: Path, name: str, line: str, message: str
) -> None:  # fmt: skip
    records = Records(tmp_path)
    write_steps(records, range(1, 4))
    lines = (tmp_path / name).read_text().splitlines()
    (tmp_path / name).write_text("\n".join([lines[0], line, *lines[1:]]) + "\n", encoding="latin-1")
    before = (tmp_path / name).read_bytes()
    read = read_metrics if name == METRICS_FILE else read_estimates
    for use in (read, lambda _: records.start(after_step=2)):
        with pytest.raises(ValueError, match=f"{name}, line 2 {message}.*fix or delete that line"):
            use(tmp_path)
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("name", ["name", "value", "stderr", "num_samples", "about_step"])
def test_an_estimate_that_lacks_a_field_is_named_by_its_line(tmp_path: Path, name: str) -> None:
    write_steps(Records(tmp_path), range(1, 3))
    first, second = (tmp_path / PROBES_FILE).read_text().splitlines()
    row = json.loads(second)
    del row[name]
    (tmp_path / PROBES_FILE).write_text(f"{first}\n{json.dumps(row)}\n")
    with pytest.raises(ValueError, match=f"{PROBES_FILE}, line 2 has no `{name}`"):
        read_estimates(tmp_path)


def test_a_number_beyond_float64_is_read_as_infinite(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text(f'{{"step": 1, "loss": {"9" * 400}, "reward": -{"9" * 5000}}}\n')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": math.inf, "reward": -math.inf}]


def test_a_file_that_was_not_written_has_no_lines_and_null_is_nan_under_any_name(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == read_estimates(tmp_path) == list(iterate_rollouts(tmp_path)) == []
    (tmp_path / METRICS_FILE).write_text('{"step": 1, "settings": {"loss": null}}\n')
    assert math.isnan(read_metrics(tmp_path)[0]["settings"]["loss"])


def test_every_line_is_standard_json(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.write_metrics(1, {"nan": math.nan, "inf": math.inf})
    records.write_estimates(1, 1, "probe", {"x": Estimate.missing("why")})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for name in (METRICS_FILE, PROBES_FILE):
        for line in (tmp_path / name).read_text(encoding="utf-8").splitlines():
            json.loads(line, parse_constant=refuse)


def test_a_checksum_does_not_depend_on_the_chunks_it_is_read_in(tmp_path, monkeypatch) -> None:
    """The published check value of CRC-32 for the nine digits is cbf43926."""
    monkeypatch.setattr(checkpoint_states, "CHUNK", 4)
    (tmp_path / "digits").write_bytes(b"123456789")
    assert checkpoint_states.checksum(tmp_path / "digits") == "cbf43926"
    (tmp_path / "digits").write_bytes(b"023456789")  # the last piece is unchanged
    assert checkpoint_states.changed_files(tmp_path, {"digits": "cbf43926"}) == ["digits"]

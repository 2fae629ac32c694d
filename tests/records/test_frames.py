"""Claims on the tables for notebooks: they have every recorded number under its name and at its step."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pandas as pd
import pytest

from rl_training.errors import UserError
from rl_training.records import evaluations, find_runs, metrics, probes
from rl_training.records.compare.page import write_comparison
from rl_training.records.evaluated import write_step
from rl_training.records.jsonl import has_records, has_steps
from rl_training.records.table.reading import read_run
from rl_training.records.table.series import LOGGED
from rl_training.records.writer import Records
from rl_training.statistics.estimate import Estimate

T_7 = 2.364624  # 97.5 % quantile of Student's t with 7 degrees of freedom, from a printed table


def record_run(folder: Path) -> Path:
    records = Records(folder / "logs")
    records.write_metrics(1, {"reward": 0.25, "grad_norm": math.inf})
    records.write_metrics(2, {"reward": 0.5, "delta_h/backward": math.nan})
    told = Estimate(-0.5, 0.1, 8, detail={"prompt": "1+1="})
    records.write_estimates(2, 1, "simple", {"delta_h/forward": told, "delta_h/backward": Estimate.missing("no")})
    return folder


def test_metrics_has_a_row_per_step_and_nan_for_values_not_logged(tmp_path: Path) -> None:
    table = metrics(record_run(tmp_path))
    assert list(table.index) == [1, 2]
    assert list(table["reward"]) == [0.25, 0.5]
    assert table.loc[1, "grad_norm"] == math.inf
    assert table["delta_h/backward"].isna().all()
    assert all(dtype.kind == "f" for dtype in table.dtypes)


def test_lines_of_one_step_are_one_row_and_rows_are_in_the_order_of_steps(tmp_path: Path) -> None:
    """A loop that writes two lines for each step, or logs that were put together in another order, lose nothing."""
    records = Records(tmp_path / "logs")
    for step, logged in ((2, {"reward": 0.5, "loss": 1.0}), (1, {"reward": 0.25}), (2, {"loss": 2.0, "length": 7})):
        records.write_metrics(step, logged)
        records.write_estimates(step, 1, "simple", {"delta_h/forward": Estimate(step, 0.1, 8)})
    table = metrics(tmp_path)
    assert table.index.tolist() == [1, 2]
    assert table["reward"].tolist() == [0.25, 0.5]
    assert table.loc[2, ["loss", "length"]].tolist() == [2.0, 7.0]
    run = read_run(tmp_path)
    assert run.steps == [1, 2]
    assert run.logged("reward").to_dict() == {1: 0.25, 2: 0.5}
    assert run.values("delta_h/forward").index.tolist() == [1, 2]


def test_metrics_named_like_a_tables_own_columns_are_read_under_their_names(tmp_path: Path) -> None:
    names = ["value", "name", "step", "file", "probe", "variable", "index"]
    for step in (1, 2):
        Records(tmp_path / "logs").write_metrics(step, dict.fromkeys(names, 10.0 * step))
    run = read_run(tmp_path)
    assert run.steps == [1, 2]
    assert sorted(run.names(LOGGED)) == sorted({*names} - {"step"})
    assert all(dict(run.logged(name)) == {1: 10.0, 2: 20.0} for name in run.names(LOGGED))


def test_probes_has_a_row_per_estimate_with_interval_reason_and_step(tmp_path: Path) -> None:
    table = probes(record_run(tmp_path)).set_index("name")
    assert table.loc["delta_h/forward", "half_width"] == pytest.approx(0.1 * T_7)
    assert table.loc["delta_h/forward", "prompt"] == "1+1="
    assert math.isnan(table.loc["delta_h/backward", "value"])
    assert table.loc["delta_h/backward", "reason"] == "no"


def test_evaluations_holds_those_of_checkpoints_and_of_the_trainer(tmp_path: Path) -> None:
    Records(record_run(tmp_path) / "logs").write_evaluation(2, {"eval_reward": 0.75, "epoch": 1.0})
    for name, value in (("sums", 0.5), ("chains", 0.25)):
        write_step(tmp_path / "evaluations" / name, 20, {}, {"pass@1": Estimate(value, 0.1, 64)}, [])
    (tmp_path / "evaluations" / "begun").mkdir()  # it has no step yet
    shutil.copytree(tmp_path / "evaluations" / "sums" / "step_20", tmp_path / "evaluations" / "sums" / "step_20.old")
    rows = evaluations(tmp_path).drop(columns=["stderr", "low", "high", "reason"]).values.tolist()
    assert rows[0][:4] == ["in training", 2, "reward", 0.75]
    assert rows[1:] == [["chains", 20, "pass@1", 0.25, 64], ["sums", 20, "pass@1", 0.5, 64]]


def test_a_run_without_probes_or_evaluations_has_empty_tables_with_their_columns(tmp_path: Path) -> None:
    Records(tmp_path / "logs").write_metrics(1, {"reward": 0.25})
    assert len(probes(tmp_path)) == len(evaluations(tmp_path)) == 0
    assert probes(tmp_path).query("name == 'delta_h/forward'").empty
    assert evaluations(tmp_path).query("metric == 'pass@1'").empty


@pytest.mark.parametrize("content", ["", "{}", '{"metrics": {"reward": {"value": 1}}}', '{"metrics": {"reward": [1]}}'])
def test_damaged_numbers_of_an_evaluation_name_their_file_and_the_fix(tmp_path: Path, content: str) -> None:
    (record_run(tmp_path) / "evaluations" / "sums" / "step_8").mkdir(parents=True)
    (tmp_path / "evaluations" / "sums" / "step_8" / "metrics.json").write_text(content)
    with pytest.raises(ValueError, match=r"sums.step_8.metrics\.json "):
        evaluations(tmp_path)


def test_a_folder_that_is_not_a_run_is_named(tmp_path: Path) -> None:
    for reader in (metrics, probes, evaluations, find_runs):
        with pytest.raises(UserError, match=r"nowhere.logs.metrics\.jsonl"):
            reader(tmp_path / "nowhere")


def test_a_run_without_a_step_is_left_out_of_a_folder_of_runs_with_a_warning(tmp_path: Path, caplog) -> None:
    runs = [record_run(tmp_path / name) for name in ("a", "b")]
    for name in ("resumed", "resumed_alone/c"):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs" / "metrics.jsonl").write_text("")
    assert [has_records(tmp_path / "resumed"), has_steps(tmp_path / "resumed"), has_steps(runs[0])] == [
        True,
        False,
        True,
    ]
    assert find_runs(tmp_path) == runs
    assert f"{tmp_path / 'resumed'} is left out: it has not logged a step yet" in caplog.text
    assert write_comparison([tmp_path], tmp_path / "page.html")[0].is_file()
    with pytest.raises(UserError, match=r"resumed_alone.logs.metrics\.jsonl "):
        find_runs(tmp_path / "resumed_alone")


def test_find_runs_finds_all_runs_in_a_folder_or_the_run_itself(tmp_path: Path) -> None:
    runs = [record_run(tmp_path / name) for name in ("a", "deep/b")]
    assert find_runs(tmp_path) == runs
    assert find_runs(runs[0]) == [runs[0]]
    assert len(pd.concat({run.name: metrics(run) for run in find_runs(tmp_path)}, names=["run"])) == 4

"""Sweeps agree with the analysis that they vary, and their results are read, drawn and sent to dashboards."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pandas as pd
import pytest
from analyzed_runs import checkpoint, results_of
from configs import composed, composing
from hydra import compose
from recorded_runs import record_run

from rl_training.job.configuration.prepare import prepare_analysis
from rl_training.job.run.analysis import analyze_checkpoints, result_files
from rl_training.offline.analysis import FEW, NOT_MEASURED, NOT_PREDICTED
from rl_training.records import analysis_results
from rl_training.records.analyses import ANALYSIS_COLUMNS, read_analysis
from rl_training.records.first_order import first_order_verdict
from rl_training.records.pages.writing import plus_minus
from rl_training.records.report import write_report
from rl_training.records.report.sections.checkpoint_analyses import (
    _agreement,
    describe_analyses,
    log_slope,
    write_analyses_page,
)

ROOT = Path(__file__).parents[2]
SMALL = ["evaluation.prompts=16", "update.prompts=8", "memory.microbatch_size=8", "log.level=none"]
SWEEP = ["sweep.evaluation_sizes=[16,8]", "sweep.update_seeds=[1,5]", "truth.etas=[0.5,0.25]", "name=sweep"]


@pytest.fixture(scope="module")
def swept(run: Path) -> pd.DataFrame:
    """Sweep everything at two checkpoints, with TensorBoard."""
    with composing():
        asked = [
            f"checkpoint=[{checkpoint(run, 1)},{checkpoint(run, 2)}]",
            'run=["trainer.report_to=[tensorboard]","trainer.temperature=0.75"]',
        ]
        analyze_checkpoints(prepare_analysis(compose("offline", [*asked, *SMALL, *SWEEP])))
    return analysis_results(run)


def only(table: pd.DataFrame, **where: Any) -> pd.Series[Any]:
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table) == 1
    return table.iloc[0]


def test_sweep_rows_with_all_of_e_and_the_same_u_equal_the_analysis(run: Path, swept: pd.DataFrame) -> None:
    for step in (1, 2):
        at = swept[swept["step"] == step]
        whole = only(at, kind="whole")
        all_of_e, same_u = only(at, kind="size", evaluation_size=16), only(at, kind="update", update_seed=1)
        for name in ("deltaH_true", "deltaH_snis", "deltaH_odd"):
            for column in (name, f"{name}_se", f"{name}_sequence"):
                assert all_of_e[column] == pytest.approx(whole[column], rel=1e-9), column
                assert same_u[column] == pytest.approx(whole[column], rel=1e-6), column
        for column in ("deltaH1", "paired_error", "deltaH1_sequence"):
            scale = abs(whole["deltaH1_sequence" if "sequence" in column else "deltaH1"])
            assert same_u[column] == pytest.approx(whole[column], rel=1e-5)
            assert all_of_e[column] == pytest.approx(whole[column], abs=0.02 * scale)  # slopes from finite differences
        results = read_analysis(run / "offline" / "sweep" / f"checkpoint-{step}" / "result.json")["results"]
        of_update = results["deltaH1_se"] ** 2 - results["deltaH1_se_evaluation"] ** 2
        assert of_update > 0.1 * results["deltaH1_se"] ** 2
        assert same_u["deltaH1_se"] ** 2 == pytest.approx(all_of_e["deltaH1_se"] ** 2 + of_update, rel=1e-4)
        other = only(at, kind="update", update_seed=5)
        assert other["deltaH1"] != whole["deltaH1"]


def test_half_of_e_has_larger_errors_and_smaller_steps_have_smaller_effects(swept: pd.DataFrame) -> None:
    errors = swept[swept["kind"] == "size"].groupby("evaluation_size")["deltaH1_se"].mean()
    assert errors[8] > errors[16]
    at = swept[swept["step"] == 1]
    etas = at[at["kind"].isin(["whole", "eta"])].sort_values("eta")
    assert list(etas["eta"]) == [0.25, 0.5, 1.0]
    assert list(etas["deltaH1"]) == pytest.approx(list(etas["eta"] * only(at, kind="whole")["deltaH1"]))
    slope, fit = log_slope(etas["eta"].to_numpy(), etas["deltaH_odd"].to_numpy())
    assert slope == pytest.approx(1.0, abs=0.05)
    assert fit > 0.999


def test_the_log_slope_of_a_power_law_is_its_exponent_and_noise_lowers_the_fit() -> None:
    etas = np.array([0.125, 0.25, 0.5, 1.0])
    assert log_slope(etas, -3.0 * etas**1.5) == pytest.approx((1.5, 1.0))
    assert log_slope(etas, etas * np.array([1.0, 2.0, 0.5, 1.0]))[1] < 0.9


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (-0.99, "by -0.99 ± 0.20 thousandths of a nat per token, and the prediction of -1.00 ± 0.20 holds"),
        (math.nan, "is not known: "),
    ],
)
def test_an_analysis_page_begins_with_its_verdict(
    run: Path, swept: pd.DataFrame, tmp_path: Path, measured: float, words: str
) -> None:
    content = json.loads((run / "offline" / "sweep" / "checkpoint-2" / "result.json").read_text())
    known = results_of(-1.0, measured if measured == measured else 0.0, 0.1)
    missing = {f"{key}{se}": None for key in ("deltaH_true", "paired_error") for se in ("", "_se")}
    content["results"] |= known if measured == measured else known | missing
    parts = {f"deltaH1/kind/{name}{se}": 1e-3 for name in ("a_second", "b") for se in ("", "_se", "_sequence")}
    content["results"] |= parts
    folder = tmp_path / "name"
    (folder / "checkpoint-2").mkdir(parents=True)
    (folder / "checkpoint-2" / "result.json").write_text(json.dumps(content))
    section = describe_analyses(folder, None)
    assert section.sentences[0].startswith("Step 3: ")
    assert words in section.sentences[0]
    assert {"kind: a_second", "kind: b"} <= {curve.label for curve in section.charts[0].series}
    page = write_analyses_page(folder, section).read_text()
    places = [page.index(text) for text in ("<h1>", section.sentences[0], "<nav", "E are the sequences", "<table")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("name", "reason", "is_drawn"),
    [("deltaH1", NOT_PREDICTED, False), ("deltaH_true", NOT_MEASURED, False), ("deltaH1_se", FEW, True)],
)
def test_an_analysis_that_cannot_be_judged_gives_the_reason_that_the_probe_recorded(
    run: Path, swept: pd.DataFrame, tmp_path: Path, name: str, reason: str, is_drawn: bool
) -> None:
    content = json.loads((run / "offline" / "sweep" / "checkpoint-2" / "result.json").read_text())
    content["results"] |= results_of(-1.0, -0.99, 0.1) | {name: None}
    content |= {"reasons": {name: reason}, "tables": {}}
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "result.json").write_text(json.dumps(content))
    section = describe_analyses(tmp_path, None)
    assert section.sentences == [f"Step 3: whether the prediction holds is not known: {reason}."]
    [agreement] = [chart for chart in section.charts if chart.name.endswith("agreement")]
    assert agreement.missing == ([] if is_drawn else [reason])


def test_a_covariance_that_is_the_same_at_every_step_has_no_correlation_and_says_so() -> None:
    steps = {"deltaH1": [-1e-3, -2e-3, -3e-3], "deltaH_true": [-1e-3, -2e-3, -2.5e-3]}
    table = pd.DataFrame({**steps, "deltaH_odd": math.nan, "covariance": 0.0, "kind": "whole"})
    with np.errstate(all="raise"):
        chart = _agreement(table, [])
    assert chart.missing == ["covariance – the same at every step: −Cov(log π, A)"]
    assert len(chart.series) == 2, "the diagonal, and predictions against the truth"


def test_a_failure_of_first_order_opens_the_analysis_page_and_the_report(
    run: Path, swept: pd.DataFrame, tmp_path: Path
) -> None:
    content = json.loads((run / "offline" / "sweep" / "checkpoint-2" / "result.json").read_text())
    content["results"] |= results_of(-1.0, 0.25, 0.1)
    folder = tmp_path / "run" / "offline" / "name"
    (folder / "checkpoint-2").mkdir(parents=True)
    (folder / "checkpoint-2" / "result.json").write_text(json.dumps(content))
    section = describe_analyses(folder, None)
    told = first_order_verdict(3, content["results"]).sentence
    assert told.startswith("Step 3: higher orders cancel the first")
    assert section.sentences == [told]
    assert told in write_analyses_page(folder, section).read_text()
    record_run(tmp_path / "run", range(1, 4))
    report = write_report(tmp_path / "run").read_text()
    assert report.count(told) == 2
    assert report.index("The predictions hold so far") < report.index(told)


def test_the_sweep_is_in_a_self_contained_page_in_the_report_and_in_a_table(run: Path, swept: pd.DataFrame) -> None:
    folder = run / "offline" / "sweep"
    table = pd.read_csv(folder / "sweep.csv")
    assert list(table) == ANALYSIS_COLUMNS
    assert len(table) == len(swept) == 2 * (1 + 2 + 2 + 2)
    whole = only(swept, kind="whole", step=2)
    shown = plus_minus(1e3 * whole["deltaH1"], 1.96e3 * whole["deltaH1_se"], "+")
    for page in (folder / "analyses.html", run / "report" / "report.html"):
        text = page.read_text()
        assert shown in text
        assert text.count('<figure class="chart"') >= 5
        page_text = re.sub(r"<script>.*?</script>|<a [^>]*>", "", text, flags=re.DOTALL)  # a link loads nothing
        assert not re.search(r'(src|href)="(?!data:|#)', page_text)


def test_dashboards_have_the_core_results_at_the_step_of_the_checkpoint(run: Path, swept: pd.DataFrame) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "logs" / "tensorboard"))
    events.Reload()
    shown = [event.tensor_proto.string_val[0] for event in events.Tensors("config/text_summary")]
    assert not any(b'"temperature": 0.75' in text for text in shown), "the settings are those of the training"
    told = {event.step: event.value for event in events.Scalars("offline/deltaH1")}
    assert told == pytest.approx({step: only(swept, kind="whole", step=step)["deltaH1"] for step in (1, 2)})


def test_a_multirun_writes_each_analysis_to_its_own_folder(run: Path) -> None:
    asked = ["evaluation.prompts=8", "memory.microbatch_size=8", "truth.enabled=false", "conditioning=false"]
    asked += ["log.level=none", "report=false", "update.prompts=4,8", f"checkpoint={checkpoint(run, 1)}", "name=mine"]
    ended = forks.run("offline.py", "-m", *asked)
    assert ended.returncode == 0, ended.stderr[-3000:]
    table = analysis_results(run).set_index("analysis")
    for prompts in (4, 8):
        assert table.loc[f"mine,update.prompts={prompts}", "update_prompts"] == prompts
    assert not list(ROOT.glob("multirun*"))


def test_checkpoints_with_the_same_result_folder_are_refused(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "training_state"
    shutil.copytree(checkpoint(run, 1), other / "checkpoint-1")
    both = f"checkpoint=[{checkpoint(run, 1)},{other / 'checkpoint-1'}]"
    cfg = composed("offline", both, f"output={tmp_path}")
    with pytest.raises(ValueError, match=r"^2 checkpoints .*/default/checkpoint-1"):
        result_files(prepare_analysis(cfg))

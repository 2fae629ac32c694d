"""What W&B, TensorBoard and trackio wrote is read back, and has every number under its own name."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
import yaml
from configs import QUICK, composed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerState
from wandb.proto import wandb_internal_pb2

from rl_training.errors import UserError
from rl_training.job.objects.dashboards import TensorBoardLogger, WandbLogger
from rl_training.job.run.folder import open_run_folder
from rl_training.probes.gns import ADAM, RATIOS
from rl_training.records.core_metrics import CORE
from rl_training.records.dashboard import sections
from rl_training.records.jsonl import read_metrics

STRAY = "of_a_chart_that_is_gone.png"
SETTINGS = [
    *QUICK, "buffer=filtered", "probe=[simple,measured,gns,ess,sampler,covariance,ground_truth]",
    "probes.ground_truth.every=1", "probes.ground_truth.sequences=16", "trainer.save_steps=1",
    "logger=wandb", "logger.metrics=all", "++trainer.report_to=[wandb,tensorboard,trackio]",
]  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two steps and resume for a third, with all loggers at once and without an account.

    In between, a picture comes into the report's folder that no report writes.
    """
    folder = tmp_path_factory.mktemp("loggers")
    env = {**os.environ, "HOME": str(folder), "NETRC": str(folder / "netrc")}
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        env.pop(name, None)
    for overrides in (["trainer.max_steps=2"], ["trainer.max_steps=3", "resume=latest"]):
        if "resume=latest" in overrides:
            shutil.copy(folder / "run" / "report" / "reward.png", folder / "run" / "report" / STRAY)
        ended = forks.run("train.py", *SETTINGS, *overrides, f"run_dir={folder / 'run'}", env=env)
        assert ended.returncode == 0, ended.stderr
    return folder / "run"


def pictures_of(run_dir: Path) -> set[str]:
    """Return the names under which dashboards have the report's pictures."""
    written = {path.name for path in (run_dir / "report").glob("*.png")}
    assert STRAY in written
    return {f"report/{Path(name).stem}" for name in written - {STRAY}}


def numbers_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return the contents of metrics.jsonl as {step: {name: value}}."""
    lines = read_metrics(run_dir / "logs")
    return {line.pop("step"): {k: v for k, v in line.items() if not math.isnan(v)} for line in lines}


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file, in LevelDB's log format: blocks of 32 KiB after a header of 7 bytes."""
    data, position, record = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position < len(data):
        left = 32768 - position % 32768
        if left < 7:  # padding, too short for a chunk's header
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def wandb_runs(run_dir: Path) -> list[list[Any]]:
    files = sorted((run_dir / "logs" / "wandb").glob("offline-run-*/*.wandb"))
    return [list(wandb_records(file)) for file in files]


def history_of(records: list[Any]) -> list[dict[str, Any]]:
    rows = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


def test_wandb_holds_every_metric_at_its_step(run_dir: Path) -> None:
    expected = numbers_of(run_dir)
    assert sorted(expected) == [1, 2, 3]
    logged: dict[int, dict[str, float]] = {}
    for records in wandb_runs(run_dir):
        for row in history_of(records):
            if "reward" in row:
                assert row["step"] not in logged
                logged[row["step"]] = {name: row[name] for name in expected[row["step"]]}
    assert logged == expected


def test_wandb_resumes_the_same_run(run_dir: Path) -> None:
    first, second = (
        [r.run for r in records if r.WhichOneof("record_type") == "run"] for records in wandb_runs(run_dir)
    )
    assert {run.run_id for run in first} == {run.run_id for run in second}
    assert {(run.project, run.display_name) for run in [*first, *second]} == {("rl-training", "run")}


@pytest.mark.parametrize("run_id", ["../../x", "", " a", "a\n", "\ud800", "a" * 200, "a?b"])
def test_an_invalid_wandb_run_id_file_is_named(tmp_path: Path, run_id: str) -> None:
    file = tmp_path / "logs" / "wandb_run_id"
    file.parent.mkdir()
    file.write_bytes(run_id.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=f"^{re.escape(str(file))} "):
        WandbLogger(tmp_path, {}).start(0)
    assert [*file.parent.iterdir()] == [file]


def test_wandb_uses_the_optimizer_step_as_x_axis_of_every_metric(run_dir: Path) -> None:
    for records in wandb_runs(run_dir):
        metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
        assert {(m.glob_name or m.name, m.step_metric) for m in metrics} >= {("*", "step"), ("step", "")}


def test_wandb_holds_the_resolved_configuration(run_dir: Path) -> None:
    config: dict[str, Any] = {}
    for record in wandb_runs(run_dir)[-1]:
        kind = record.WhichOneof("record_type")
        updates = record.run.config.update if kind == "run" else record.config.update if kind == "config" else []
        config |= {update.key: json.loads(update.value_json) for update in updates if update.key}
    saved = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    assert {name: config[name] for name in saved} == saved


def test_wandb_holds_the_figures_of_the_report(run_dir: Path) -> None:
    pictures = pictures_of(run_dir)
    assert len(pictures) >= 3
    first, last = (
        {name.removesuffix("/path") for row in history_of(records) for name in row if name.endswith("/path")}
        for records in wandb_runs(run_dir)
    )
    assert last == pictures
    assert pictures - first == {"report/ledger", "report/predictors"}  # need more steps than the first part has
    copies = list((run_dir / "logs" / "wandb").glob("offline-run-*/files/media/images/report/*.png"))
    assert len(copies) == len(first) + len(last)


def test_tensorboard_holds_every_metric_at_its_step(run_dir: Path) -> None:
    events = EventAccumulator(str(run_dir / "logs" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    logged: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in logged.setdefault(event.step, {})
            logged[event.step][name] = event.value
    expected = numbers_of(run_dir)
    assert {step: sorted(row) for step, row in logged.items()} == {step: sorted(row) for step, row in expected.items()}
    for step, row in expected.items():  # TensorBoard stores fp32
        assert logged[step] == pytest.approx(row, rel=1e-6, abs=1e-30)


def test_tensorboard_holds_the_figures_of_the_report(run_dir: Path) -> None:
    events = EventAccumulator(str(run_dir / "logs" / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["images"]) == pictures_of(run_dir)


def test_a_run_logs_the_core_numbers_by_default() -> None:
    assert composed("train", "logger=wandb").logger.metrics == "core"


def test_metrics_core_logs_the_core_numbers_alone(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, {}, CORE)
    logger.start(0)
    logger.on_log(None, TrainerState(global_step=1), None, {**dict.fromkeys(CORE, 1.0), "delta_h/layer/0": 2.0})
    logger.finish([])
    events = EventAccumulator(str(tmp_path / "logs" / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(CORE)


@pytest.mark.parametrize("kind", [WandbLogger, TensorBoardLogger])
def test_a_file_where_a_dashboard_needs_a_folder_is_named(tmp_path: Path, kind: Any) -> None:
    """When a run is built, and when an analysis or an evaluation adds to a run's dashboard."""
    name = kind.__name__.removesuffix("Logger").lower()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / name).touch()
    refused = rf"logs/{name} is a file"
    with pytest.raises(UserError, match=refused):
        kind(tmp_path, {}).start(0)
    with pytest.raises(UserError, match=refused):
        open_run_folder(composed("train", f"run_dir={tmp_path}"))


def test_trackio_holds_every_metric_at_its_step_in_one_run(run_dir: Path) -> None:
    with sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "rl-training.db") as database:
        rows = database.execute("SELECT run_name, run_id, step, metrics FROM metrics").fetchall()
        configs = database.execute("SELECT config FROM configs").fetchall()
    rows = [(name, run_id, step, json.loads(metrics)) for name, run_id, step, metrics in rows]
    ours = [row for row in rows if "reward" in row[3]]
    assert {(name, run_id) for name, run_id, _, _ in ours} == {("run", ours[0][1])}
    assert {step: metrics for _, _, step, metrics in ours} == numbers_of(run_dir)
    assert len(ours) == 3
    assert json.loads(configs[0][0])["trainer"]["num_generations"] == 4


def test_every_panel_of_the_dashboard_has_something_to_show(run_dir: Path) -> None:
    names = {name for row in numbers_of(run_dir).values() for name in row}
    for title, panel in ((title, panel) for panels in sections().values() for title, panel in panels.items()):
        metrics, pattern = set(panel.get("metrics", [])), panel.get("pattern")
        shown = {name for name in names if name in metrics or (pattern and re.search(pattern, name))}
        late = set(ADAM) | {name for name in RATIOS if name.endswith(("_low", "_high"))}  # they need 10 and 8 steps
        assert shown or metrics <= late, title
        assert metrics - shown <= late, title

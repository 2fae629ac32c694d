"""Which folders are checkpoints, and of which step; and which hold an attached run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from rl_training.job.evaluation.checkpoints import checkpoints_by_step
from rl_training.records.claim import holds_run
from rl_training.records.folder import checkpoints_of, step_of
from rl_training.records.jsonl import LOGS_FOLDER
from rl_training.records.made_by import is_of_attached_run
from rl_training.records.table.reading import read_run
from rl_training.records.writer import Records


@pytest.mark.parametrize(
    "name", ["checkpoint-20-backup", "checkpoint-²", "checkpoint-٣", "checkpoint-", "checkpoint-best"]
)
def test_a_folder_with_more_than_a_number_after_checkpoint_is_none_of_the_run(tmp_path: Path, name: str) -> None:
    Records(tmp_path / LOGS_FOLDER).write_metrics(1, {"reward": 0.5})
    for folder in ("checkpoint-3", "checkpoint-12", name):
        (tmp_path / "training_state" / folder).mkdir(parents=True)
    assert list(map(step_of, checkpoints_of(tmp_path))) == [3, 12]
    assert read_run(tmp_path).last_step == 12
    with pytest.raises(ValueError, match=re.escape(name)):
        step_of(tmp_path / "training_state" / name)


def test_the_step_of_evaluated_weights_is_in_the_name_checkpoint_n_or_their_state_or_any_name(tmp_path: Path) -> None:
    for name in ("checkpoint-7", "epoch-1", "global_step_40", "final", "checkpoint-²"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-7", "epoch-1"):
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"global_step": 20}))
    (tmp_path / "final" / "trainer_state.json").write_text("[]")
    steps = {
        path.name: step for step, path in checkpoints_by_step([tmp_path / "checkpoint-7", tmp_path / "epoch-1"]).items()
    }
    assert steps == {"checkpoint-7": 7, "epoch-1": 20}
    assert list(checkpoints_by_step([tmp_path / "global_step_40", tmp_path / "final"])) == [0, 40]
    assert list(checkpoints_by_step([tmp_path / "checkpoint-²"])) == [0]


@pytest.mark.parametrize("name", ["config.yaml", "logs/settings.json"])
def test_an_attached_run_is_known_by_its_settings_however_they_are_written_down(tmp_path: Path, name: str) -> None:
    """An attached run's config.yaml alone does not make its folder another training's; a job's does."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    dump = json.dumps if name.endswith("json") else yaml.safe_dump
    path.write_text("# edited by hand\n" * name.endswith("yaml") + dump({"a": 1, "made_by": "trl"}))
    assert is_of_attached_run(tmp_path)
    assert not holds_run(tmp_path)
    for damaged in ({"made_by": "job"}, {"made_by": ["trl"]}, {}):
        path.write_text(dump(damaged))
        assert not is_of_attached_run(tmp_path)
        assert holds_run(tmp_path) == name.endswith("yaml")
    path.write_text("made_by: trl\n&a [1")
    assert not is_of_attached_run(tmp_path)

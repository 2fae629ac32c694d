"""A damaged file of a checkpoint or of its analysis is named in a UserError, whatever is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_training.errors import UserError
from rl_training.records.analyses import analysis_results, probe_logs, read_probe_log
from rl_training.records.checkpoint_states import PROBE_STATES, read_notes
from rl_training.records.evaluated import EVALUATION_SETTINGS_FILE, store_settings_once

READERS = {
    PROBE_STATES: lambda path: read_notes(path.parent),
    "entropy_probe_1_summary.json": lambda path: probe_logs(path.parent),
    "entropy_probe_1.json": read_probe_log,
    "result.json": lambda path: analysis_results(path.parent),
}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"core": {', '{"core": 1, "timing": 2, "reasons": 3}', "\0\1"])
@pytest.mark.parametrize("name", READERS)
def test_damaged_content_is_an_error_that_names_the_file(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        READERS[name](tmp_path / name)
    assert str(error.value).startswith(str(tmp_path / name))


@pytest.mark.parametrize("content", ["", "[]", '{"kl": tr', "\0\1"])
def test_damaged_settings_of_an_evaluation_are_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / EVALUATION_SETTINGS_FILE
    path.write_text(content)
    with pytest.raises(UserError, match=f"^{path} is damaged "):
        store_settings_once(tmp_path, {"kl": True})
    assert path.read_text() == content


def test_an_analysis_is_read_from_within_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "offline" / "mine" / "checkpoint-1"
    folder.mkdir(parents=True)
    result = {"checkpoint": "c", "step": 1, "results": {"B_E": 8, "B_U": 4, "G": 2}, "tables": {},
              "settings": {"offline": {"update": {"filtered": False, "seed": 1}}}}  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    monkeypatch.chdir(folder)
    assert analysis_results(".")["analysis"].tolist() == ["mine"]
    assert probe_logs(".")["path"].tolist() == [], "it has no log"

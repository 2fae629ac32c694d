"""A sparse file, which claims any size, is refused in one line before it takes memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_training.errors import UserError
from rl_training.job.evaluation.result_folder import fingerprint
from rl_training.models.load import refuse_code_in_adapter
from rl_training.records.analyses import read_analysis, read_probe_log
from rl_training.records.checkpoint_flaws import find_weights_flaw
from rl_training.records.checkpoints import steps_taken
from rl_training.records.evaluated import read_step, store_settings_once
from rl_training.records.jsonl import read_metrics, read_settings

READERS: dict[str, Callable[[Path], object]] = {
    "logs/metrics.jsonl": lambda run: read_metrics(run / "logs"),
    "logs/settings.json": read_settings,
    "evaluations/a/step_1/metrics.json": lambda run: read_step(run / "evaluations" / "a", 1),
    "evaluations/a/settings.json": lambda run: store_settings_once(run / "evaluations" / "a", {}),
    "checkpoint-1/trainer_state.json": lambda run: steps_taken(run / "checkpoint-1"),
    "checkpoint-2/trainer_state.json": lambda run: fingerprint(run / "checkpoint-2"),
    "offline/a/checkpoint-1/result.json": lambda run: read_analysis(run / "offline/a/checkpoint-1/result.json"),
    "log.json.gz": lambda run: read_probe_log(run / "log.json.gz"),
    "adapter_config.json": refuse_code_in_adapter,
}


@pytest.mark.parametrize("name", READERS)
def test_a_sparse_file_is_refused_by_its_name_and_takes_no_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.truncate(2**30)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=path.name):
            READERS[name](tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**27
    finally:
        tracemalloc.stop()


def test_a_checkpoint_with_a_sparse_state_is_skipped_with_the_reason(tmp_path: Path) -> None:
    with open(tmp_path / "trainer_state.json", "wb") as file:
        file.truncate(2**30)
    assert "trainer_state.json has more than 268 MB" in find_weights_flaw(tmp_path)

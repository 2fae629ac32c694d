"""An analysis that ends early: for lack of memory it says what to lower, and a kill leaves nothing half-written."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from analyzed_runs import SMALL, checkpoint

from rl_training.offline.analysis import analyze
from rl_training.offline.phases import LOWER, Phases
from rl_training.offline.restored import RestoredTrainer
from rl_training.records import analysis_results, probe_logs, read_probe_log

MORE_THAN_THERE_IS = 1 << 60  # bytes
QUICK = [
    "evaluation.prompts=8", "update.prompts=4", "memory.microbatch_size=8", "conditioning=false", "truth.odd=false",
    "trainer.disable_tqdm=false",
]  # fmt: skip


@pytest.mark.parametrize("phase", ["sample U", "sample E", "gradient of U", "gradient of E", "truth"])
def test_a_phase_that_runs_out_of_memory_names_the_setting_to_lower(
    restored: RestoredTrainer, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A real allocation by torch fails in the model after the phase has begun."""
    begun: list[str] = []
    begin: Callable[..., AbstractContextManager[Any]] = Phases.__call__

    def noted(self: Phases, name: str, total: int) -> AbstractContextManager[Any]:
        begun.append(name)
        return begin(self, name, total)

    def take_too_much(*arguments: Any) -> None:
        if begun[-1:] == [phase]:
            torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8)

    monkeypatch.setattr(Phases, "__call__", noted)
    handle = restored.trainer.model.get_input_embeddings().register_forward_pre_hook(take_too_much)
    try:
        with pytest.raises(ValueError, match=f"memory .*'{phase}': ") as caught:
            analyze(restored, SMALL)
    finally:
        handle.remove()
    assert str(caught.value).endswith(LOWER[phase])


def test_a_process_short_of_memory_ends_with_the_setting_to_lower(run: Path) -> None:
    ended = forks.run(
        "tests/support/killed.py", "memory:30", "offline.py", f"checkpoint={checkpoint(run, 1)}", "name=short",
        "evaluation.prompts=4096", "update.prompts=64", "memory.microbatch_size=4096", "memory.generation_size=4096",
    )  # fmt: skip
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if "error: " in line]
    assert line in [f"error: out of memory in phase '{phase}': {what}" for phase, what in LOWER.items()]
    assert not (run / "offline" / "short").exists()


def test_an_analysis_killed_at_any_moment_leaves_only_complete_files(run: Path, tmp_path: Path) -> None:
    """Three analyses write to one folder; SIGKILL comes in the middle of measuring and of writing pages."""
    command = ("offline.py", f"checkpoint={checkpoint(run, 1)}", f"output={tmp_path}", "log.level=minimal", *QUICK)
    for moment, num_logs, num_results in (("said:truth", 0, 0), ("rename:analyses.html", 1, 1)):
        killed = forks.run("tests/support/killed.py", moment, *command)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
        assert_whole(tmp_path, num_logs, num_results, num_pages=0)
    assert forks.run(*command).returncode == 0
    assert_whole(tmp_path, num_logs=2, num_results=1, num_pages=1)


def assert_whole(folder: Path, num_logs: int, num_results: int, num_pages: int) -> None:
    """Assert that this many logs, results and pages exist, are readable, and are complete."""
    logs = probe_logs(folder)
    assert len(logs) == num_logs
    assert all(len(read_probe_log(path)) > 0 for path in logs["path"])
    assert len(analysis_results(folder)) == num_results
    pages = list(folder.rglob("analyses.html"))
    assert len(pages) == num_pages
    assert all("</html>" in page.read_text() for page in pages)

"""verl's whole loop by this package's command: records, loggers, checkpoints and a report; make test-verl-loop."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

pytest.importorskip("verl.workers")

from whole_loop import run

from rl_training.records.jsonl import read_estimates, read_metrics
from rl_training.records.report import write_report

pytestmark = pytest.mark.slow


def test_the_command_trains_measures_and_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    """Two processes take four steps, the last of them after resuming. Each prompt's responses are in one microbatch."""
    saving = ["trainer.save_freq=3", "trainer.resume_mode=auto"]
    for steps in (3, 4):
        finished = run(tmp_path, 2, "probe=[simple,gns]", *saving, f"trainer.total_training_steps={steps}")
        assert finished.returncode == 0, (finished.stdout + finished.stderr)[-5000:]
    logs = tmp_path / "run" / "logs"
    rows = read_metrics(logs)
    assert [row["step"] for row in rows] == [row["training/global_step"] for row in rows] == [1, 2, 3, 4]
    values = {(row["step"], row["name"]): row["value"] for row in read_estimates(logs)}
    for step in (2, 3, 4):
        assert all(math.isfinite(values[step, f"delta_h/{name}"]) for name in ("forward", "backward", "trapezoid"))
        assert math.isfinite(values[step, "gns/trace"])
    of_loggers = re.findall(r"actor/delta_h/forward:(\S+)", finished.stdout + finished.stderr)
    assert [float(text) for text in of_loggers] == [pytest.approx(values[4, "delta_h/forward"])]
    assert write_report(tmp_path / "run").is_file()

"""The examples run as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import forks

from rl_training.records.jsonl import read_metrics
from rl_training.tasks.tiny import TINY_PATH


def test_a_script_as_in_trls_quickstart_has_a_report_by_six_lines_more(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = "\n".join(json.dumps({"prompt": f"{number}+1="}) for number in range(8))
    (tmp_path / "data" / "train.jsonl").write_text(rows, encoding="utf-8")
    settings = {
        "model_name_or_path": TINY_PATH, "dataset_name": tmp_path / "data", "output_dir": tmp_path / "run",
        "max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2,
        "num_generations": 4, "max_completion_length": 8, "report_to": "none", "use_cpu": True, "bf16": False,
        "save_strategy": "no",
    }  # fmt: skip
    typed = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    ended = forks.run("examples/trl_script.py", *typed)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "logs") if "delta_h/forward" in row] == [1, 2]
    assert (tmp_path / "run" / "report" / "report.html").is_file()
    script = Path(__file__).parents[2].joinpath("examples", "trl_script.py").read_text(encoding="utf-8")
    assert sum(line.endswith("# probes") for line in script.splitlines()) == 6

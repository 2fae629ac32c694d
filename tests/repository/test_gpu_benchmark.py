"""All of benchmarks/gpu.py also runs on the CPU, so it has been tried before a GPU machine is rented."""

from __future__ import annotations

import re
from pathlib import Path

import forks


def test_one_command_runs_every_section(tmp_path: Path) -> None:
    ended = forks.run("benchmarks/gpu.py", "--small", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr  # a failed section makes it 1
    done = re.findall(r"^(\w+): \d+ s$", ended.stdout, re.MULTILINE)
    assert "Left out" not in (tmp_path / "gpu.md").read_text(encoding="utf-8")  # there was enough time
    assert done == ["tests", "offload", "synchronisations", "precisions", "products", "costs"]

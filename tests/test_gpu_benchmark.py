"""benchmarks/gpu.py runs on the CPU too, all of it: what a rented machine is asked for has been tried."""

from __future__ import annotations

from pathlib import Path

import warm


def test_one_command_writes_the_whole_page(tmp_path: Path) -> None:
    ended = warm.run("benchmarks/gpu.py", "--small", "--out", str(tmp_path))
    page = (tmp_path / "gpu.md").read_text()
    assert ended.returncode == 0, page + ended.stderr
    assert "FAILED" not in page
    assert "Left out" not in page
    sections = [part.split("\n", 1) for part in page.split("\n## ")[1:]]
    assert len(sections) == 6
    tables = [text for title, text in sections if "Tests" not in title and "waits" not in title]
    assert all("|---|" in text for text in tables)
    assert sections[-1][1].count("| `simple` |") == 4  # two ranks, with checkpointing and without
    assert "| `gns+ess` |" in sections[-1][1]

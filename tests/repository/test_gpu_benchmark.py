"""All of benchmarks/gpu.py also runs on the CPU, so it has been tried before a GPU machine is rented."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import forks
import gpu
import pytest


def test_every_section_measures_its_rows(tmp_path: Path) -> None:
    """One process runs them, because each would import everything anew."""
    page, names = tmp_path / "gpu.md", [section.name for section in gpu.SECTIONS]
    ended = forks.run("benchmarks/gpu_sections.py", *names, "--page", str(page), "--seconds", "600", "--small")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = page.read_text(encoding="utf-8")
    assert "Left out" not in text  # there was enough time
    for row in (
        r"no \| `measured`",
        r"all weights \| 6 \| yes \| `simple`",
        "host memory",
        r"no \| `simple`",
        "cuda-fp32",
    ):
        assert re.search(rf"\| {row}", text) or row in text, row
    ratios = [float(row.split("|")[6]) for row in text.splitlines() if row.count("|") == 9 and "`" in row]
    assert len(ratios) == 6
    (bounded,) = re.findall(r"^\| 2 \| 6 \| (\S+) \(", text, re.MULTILINE)
    assert min(*ratios, float(bounded)) > 0.0  # how far above 1, a busy machine does not tell


SCRIPT = """
    import pathlib, sys, time
    name, page = sys.argv[1], pathlib.Path(sys.argv[3])
    with page.open("a") as file:
        file.write(f"row of {name}\\n")
    print(f"output of {name}")
    if name == "machine":
        time.sleep(60)
    if name == "tests":
        sys.exit(3)
"""


def test_a_section_that_hangs_or_fails_loses_no_row_and_no_other_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "sections.py"
    script.write_text(textwrap.dedent(SCRIPT))
    limits = {"machine": 0.7, "tests": 20, "costs": 20, "late": 0}
    monkeypatch.setattr(gpu, "SCRIPT", script)
    monkeypatch.setattr(gpu, "SECTIONS", [gpu.Section(name, f"Title of {name}", limits[name]) for name in limits])
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=": machine, tests, late"):
        gpu.main()
    hanging, failing, whole, late = (tmp_path / "gpu.md").read_text(encoding="utf-8").split("\n## ")[1:]
    for name, part in (("machine", hanging), ("tests", failing), ("costs", whole)):
        assert part.startswith(f"Title of {name}\n\nrow of {name}\n")
    assert "STOPPED: it took longer than its limit of 1 s" in hanging
    assert "FAILED with exit code 3" in failing
    assert "output of tests" in failing
    assert "output of machine" not in failing
    assert late == "Title of late\n\nLeft out for lack of time.\n"


def test_all_limits_together_are_nine_minutes() -> None:
    assert sum(section.limit for section in gpu.SECTIONS) <= 9 * 60

"""The notebook in examples/ runs as it is stored, and its cell with the two lines can be run again."""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "two_lines.ipynb"


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_runs_and_its_cell_can_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    display = ModuleType("IPython.display")  # installed with notebooks, not for the tests
    display.IFrame = lambda page, **size: Path(page).read_bytes()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    made, two_lines, *others = ("".join(cell["source"]) for cell in code_cells())
    names: dict[str, Any] = {}
    exec(made.replace("max_steps=4", "max_steps=2"), names)
    for folder in ("runs/my_run", "runs/my_run-2"):
        exec(two_lines, names)
        assert names["attached"].report == Path(folder, "report", "report.html")
        assert names["attached"].report.is_file()
        assert names["attached"].latest["delta_h/forward"].stderr > 0.0
    for cell in others:
        exec(cell, names)
    page = names["attached"].report.read_text(encoding="utf-8")
    assert f'<iframe srcdoc="{html.escape(page)}"' in names["attached"]._repr_html_()


def test_the_notebook_is_stored_with_the_outputs_of_its_run() -> None:
    numbers = [cell["execution_count"] for cell in code_cells()]
    assert numbers == [1, 2, 3, 4]
    assert not any(output["output_type"] == "error" for cell in code_cells() for output in cell["outputs"])

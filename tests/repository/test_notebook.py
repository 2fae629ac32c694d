"""The notebook runs from the first cell to the last, on runs with everything and on one with almost nothing."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rl_training.records.evaluated import write_step
from rl_training.records.writer import Records
from rl_training.statistics.estimate import Estimate

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "training_analysis.ipynb"


def record(folder: Path, probed: bool) -> Path:
    records = Records(folder / "logs")
    for step in range(1, 7):
        records.write_metrics(step, {"loss": 0.1, "reward": 0.1 * step, "entropy": 1 / step})
        if probed:
            names = ("forward", "backward", "cumulative_measured", "cumulative_predicted")
            estimates = {f"delta_h/{name}": Estimate(-0.1 * step, 0.01, 8) for name in names}
            records.write_estimates(step, 1, "simple", estimates)
    return folder


def run_notebook(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Run the notebook, and return the values of its cells as text and the number of figures. Exceptions propagate.

    It runs in this process, because a Jupyter kernel would import everything again.
    """
    import matplotlib.pyplot as plt  # not above: each process that runs tests imports this module

    monkeypatch.setenv("RUNS", os.pathsep.join(map(str, runs)))
    plt.close("all")
    names: dict[str, object] = {}
    values = []
    for cell in cells():
        statements = ast.parse("".join(cell["source"])).body
        last = [statements.pop()] if isinstance(statements[-1], ast.Expr) else []
        exec(compile(ast.Module(statements, []), str(NOTEBOOK), "exec"), names)
        values += [eval(compile(ast.Expression(line.value), str(NOTEBOOK), "eval"), names) for line in last]
    figures = len(plt.get_fignums())
    plt.close("all")
    return "\n".join(map(str, values)), figures


def cells() -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_shows_several_runs_and_skips_what_one_did_not_record(tmp_path, monkeypatch) -> None:
    runs = [record(tmp_path / name, probed=name != "bare") for name in ("first", "second", "bare")]
    numbers = {"reward": Estimate(0.5, 0.1, 64), "kl/token": Estimate(0.1, 0.01, 64)}
    write_step(runs[0] / "evaluations" / "sums", 4, {}, numbers, [])
    text, figures = run_notebook([tmp_path], monkeypatch)
    assert all(name in text for name in ("first", "second", "bare"))
    assert "-0.6" in text  # the measured and the predicted change at step 6
    assert figures == 4


def test_the_notebook_is_stored_without_outputs() -> None:
    for cell in cells():
        assert not cell["outputs"]
        assert cell["execution_count"] is None

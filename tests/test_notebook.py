"""The notebook runs from the first cell to the last, on runs with everything and one with next to nothing."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from rl_training.mathematics.estimate import Estimate
from rl_training.records.jsonl import Records

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "training_analysis.ipynb"


def record(folder: Path, probed: bool) -> Path:
    records = Records(folder / "logs")
    for step in range(1, 7):
        records.write_metrics(step, {"loss": 0.1, "reward": 0.1 * step, "entropy": 1 / step})
        if probed:
            names = ("forward", "backward", "cumulative_measured", "cumulative_predicted")
            estimates = {f"delta_h/{name}": Estimate(-0.1 * step, 0.01, 8) for name in names}
            records.write_estimates(step, 1, "simple", estimates)
    return folder


def run_notebook(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the text that its cells put out; an exception in one of them is raised here."""
    monkeypatch.setenv("RUNS", os.pathsep.join(map(str, runs)))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(str(output.get("text", output.get("data", {}).get("text/plain", ""))) for output in outputs)


def test_the_notebook_shows_several_runs_and_leaves_out_what_one_has_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [record(tmp_path / name, probed=name != "bare") for name in ("first", "second", "bare")]
    folder = runs[0] / "evaluations" / "sums"
    folder.mkdir(parents=True)
    table = "step,metric,value,stderr,num_prompts\n4,reward,0.5,0.1,64\n4,kl/token,0.1,0.01,64\n"
    (folder / "consolidated_metrics.csv").write_text(table)
    text = run_notebook([tmp_path], monkeypatch)
    assert all(name in text for name in ("first", "second", "bare"))
    assert "-0.6" in text  # measured and predicted, at step 6
    assert text.count("<Figure size") == 4


def test_the_notebook_is_stored_without_outputs() -> None:
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None

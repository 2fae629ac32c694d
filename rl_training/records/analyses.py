"""Checkpoint analyses (RUN/offline/NAME/checkpoint-N/result.json) as one pandas DataFrame."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from rl_training.records.json_values import from_json

OFFLINE = "offline"  # folder of a run that holds analyses of its checkpoints
RESULT_FILE = "result.json"
ABOUT = ["analysis", "checkpoint", "step", "kind"]
VARIED = ["evaluation_size", "eta", "update_prompts", "update_filtered", "update_seed"]
NUMBERS = ["deltaH1", "deltaH_true", "deltaH_snis", "deltaH_odd", "paired_error", "paired_error_odd", "covariance"]
ALONE = ["ESS", "H_orig", "avg_reward", "learning_rate"]
COLUMNS = [
    *ABOUT, *VARIED, *(f"{name}{unit}{se}" for name in NUMBERS for unit in ("", "_sequence") for se in ("", "_se")),
    *ALONE,
]  # fmt: skip


def analysis_results(folder: str | Path) -> pd.DataFrame:
    """Returns a row per prediction and its truth, of all analyses in a folder (run or RUN/offline/NAME); see COLUMNS.

    kind   "whole": the analysis itself. Of sweeps: "eta", another multiple of the step; "size", fewer sequences of E;
           "update", another U
    step   optimizer steps behind the checkpoint: the step that is analysed is the next one

    Numbers are in nats, `…_se` one standard error; what was not asked for is nan. No rows where there is no analysis.
    Raises ValueError for a damaged file, naming it.
    """
    folder = Path(folder)
    below = folder / OFFLINE if (folder / OFFLINE).is_dir() else folder
    rows = [row for path in sorted(below.rglob(RESULT_FILE)) for row in _rows_of(path)]
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.astype({name: float for name in COLUMNS if name not in ABOUT and name != "update_filtered"})


def read_analysis(path: str | Path) -> dict[str, Any]:
    """Returns what a result.json holds; nan where a number is not available, with the reason in `reasons`."""
    try:
        content: dict[str, Any] = from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        content["results"], content["step"], content["settings"]["offline"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no result of a checkpoint analysis ({error}): delete it") from error
    return content


def _rows_of(path: Path) -> Iterator[dict[str, Any]]:
    content = read_analysis(path)
    results, own, tables = content["results"], content["settings"]["offline"], content["tables"]
    whole = {
        "analysis": path.parents[1].name, "checkpoint": content["checkpoint"], "step": content["step"], "kind": "whole",
        "evaluation_size": results["B_E"], "eta": 1.0, "update_prompts": results["B_U"],
        "update_filtered": own["update"]["filtered"], "update_seed": own["update"]["seed"],
        **{name: results.get(name) for name in COLUMNS if name in results},
    }  # fmt: skip
    yield whole
    bare = {name: whole[name] for name in (*ABOUT, *VARIED)}
    for row in tables.get("eta", []):
        if row["eta"] != 1.0:
            linear = ("deltaH1", "deltaH1_se", "deltaH1_sequence", "deltaH1_sequence_se")
            predicted = {name: row["eta"] * results[name] for name in linear}
            yield {**bare, "kind": "eta", **predicted, **row}
    for kind, name in (("size", "sizes"), ("update", "updates")):
        for row in tables.get(name, []):
            yield {**bare, "kind": kind, **row}

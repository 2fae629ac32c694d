"""The output of a checkpoint analysis: result.json, written atomically, its reader, and a table in the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_training.offline.probe import Analysis
from rl_training.offline.restored import RestoredTrainer
from rl_training.records.analyses import Z_95, verdict
from rl_training.records.atomic_write import write_atomically
from rl_training.records.jsonl import from_json, to_json
from rl_training.records.report.words import MILLI, plus_minus
from rl_training.version import VERSION

ROWS = {
    "deltaH1": "predicted, first order",
    "deltaH_true": "measured (PDIS)",
    "paired_error": "predicted − measured, same E",
    "deltaH_odd": "measured without second order",
    "paired_error_odd": "predicted − that, same E",
    "deltaH_snis": "measured (SNIS)",
    "deltaH1/part/momentum": "predicted: momentum",
    "deltaH1/part/gradient": "predicted: this gradient",
    "deltaH1/part/decay": "predicted: weight decay",
}
DRAWN_AFRESH = {
    "deltaH_true": "measured (fresh samples)",
    "paired_error": "predicted − measured, same prompts",
    "paired_error_odd": "predicted − that, same prompts",
}


def write_result(
    path: Path, restored: RestoredTrainer, analysis: Analysis, settings: Mapping[str, Any], log: Path | None = None
) -> None:
    """Writes the results of an analysis as JSON, atomically: a kill leaves the old file or the complete new one."""
    content = {
        "version": VERSION,
        "checkpoint": str(restored.checkpoint),
        "step": restored.step,
        "world_size": restored.num_ranks,
        "results": analysis.results,
        "reasons": analysis.reasons,
        "tables": analysis.tables,
        "timing": analysis.seconds,
        "log": str(log or ""),
        "settings": settings,
    }
    text = json.dumps(to_json(content), indent=1, ensure_ascii=False)
    write_atomically({path: text.encode()})


def read_result(path: str | Path) -> dict[str, Any]:
    """Returns what `write_result` wrote, with null as nan."""
    return from_json(json.loads(Path(path).read_text(encoding="utf-8")))


def print_table(analysis: Analysis, restored: RestoredTrainer, path: Path) -> None:
    """Prints the core numbers, in thousandths of a nat with their 95 % intervals."""
    found = analysis.results
    table = Table(title=f"step {restored.step + 1}, from {restored.checkpoint}", title_justify="left")
    table.add_column("change of entropy, 1e-3 nats, ± 95 %")
    for unit in ("per token", "per sequence"):
        table.add_column(unit, justify="right")
    rows = ROWS | (DRAWN_AFRESH if found.get("resampled") else {})
    for key, label in rows.items():
        if not math.isnan(found.get(key, math.nan)):
            table.add_row(label, _with_error(found, key), _with_error(found, f"{key}_sequence"))
    console = Console(soft_wrap=True, markup=False, emoji=False)  # a path stays as it was typed
    console.print(table)
    sizes = f"E {found['B_E']:.0f} sequences, U {found['B_U']:.0f} × {found['G']:.0f}"
    teaching = f"{100 * found['zero_advantage']:.0f} % of U has zero advantage"
    console.print(f" {sizes}; reward {found['avg_reward']:.3f}, {teaching}; learning rate {found['learning_rate']:.3g}")
    if analysis.truth is not None:
        how = "fresh samples at the moved weights: effective sample size" if found["resampled"] else "ESS"
        console.print(f" {how} {found['ESS']:.1f} of {found['B_E']:.0f}; H {found['H_orig']:.4f} nats per token")
    if analysis.tables.get("conditioning"):
        shares = ", ".join(f"{row['name']} {MILLI * row['delta_h1']:+.2f}" for row in analysis.tables["conditioning"])
        console.print(f" predicted per token under other preconditioners, same ‖δθ‖: {shares}")
    failed = verdict(restored.step + 1, found)
    if failed:
        console.print(f" {failed}", style="bold")
    console.print(" " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in analysis.seconds.items()))
    console.print(f" {path}")


def _with_error(found: Mapping[str, float], key: str) -> str:
    return plus_minus(MILLI * found.get(key, math.nan), Z_95 * MILLI * found.get(f"{key}_se", math.nan), "+")

"""Which tokens change entropy: classes of tokens, and the ten tokens that take most."""

from __future__ import annotations

import math
import re
from typing import Any

from rl_training.records.report.series import Run, last_of
from rl_training.records.report.trends import times
from rl_training.records.report.writing import MISSING, milli, on_one_line
from rl_training.statistics.estimate import Estimate

TOKEN_CLASS = re.compile(r"^tokens/([^/]+)/([^/]+)/mean_delta_h$")
KINDS = {"entropy": "entropy at the token", "position": "place in its response"}
CHANGES = ["by this step", "with momentum"]


def token_classes(run: Run) -> tuple[list[list[str]], int]:
    """Return the table of token classes, from the last running means, and the number of steps that these average."""
    rows, steps, factor = [], 0, kept_factor(run)
    for kind, name in (match.groups() for match in map(TOKEN_CLASS.match, run.names()) if match):
        metric = f"tokens/{kind}/{name}"
        change = run.finite_rows(f"{metric}/mean_delta_h").tail(1)
        share = run.rows(f"{metric}/share_of_tokens")["value"].reindex(change.index).sum()
        if share > 0:
            steps = run.measured_steps(f"{metric}/mean_delta_h")
            words = KINDS.get(kind, f"its {kind}"), name.replace("_", " ")
            rows.append([*map(on_one_line, words), f"{100 * share:.1f}%", *_changes(last_of(change), factor)])
    return [["by", "class", "of all tokens", *CHANGES], *rows] if rows else [], steps


def top_tokens(run: Run) -> tuple[list[list[str]], int]:
    """Return the table of the tokens that take most entropy, as last recorded, and the number of steps behind it."""
    rows = run.top_tokens
    rows = rows[rows["value"].notna()] if len(rows) else rows
    if rows.empty or "text" not in rows:
        return [], 0
    last = rows[rows["step"] == rows["step"].max()]
    examples = rows[rows["example"].astype(bool)].groupby("text")["example"].last()
    cells = [_token_cells(row, examples.get(row["text"], "")) for row in last.to_dict("records")]
    headings = ["token", "example", "of all tokens", *CHANGES, "share of the whole"]
    return [headings, *cells], int(last["measured_steps"].iloc[0])


def kept_factor(run: Run) -> float:
    """Return the factor from a step's own gradient to what momentum makes of it; nan if unknown."""
    factors = run.top_tokens.get("kept_factor")
    known = [] if factors is None else factors.dropna().tolist()
    return float(known[-1]) if known else math.nan


def _token_cells(row: dict[str, Any], example: str) -> list[str]:
    change = Estimate(row["value"], row["stderr"], int(row["num_samples"]))
    whole = Estimate(row["whole"], row["whole_stderr"], int(row["num_samples"]))
    share = f"{100 * change.value / whole.value:.0f}%" if whole.bounds()[1] < 0 else MISSING
    cells = [row["text"].replace("\n", "⏎"), example, f"{100 * row['share_of_tokens']:.1f}%"]
    return [*map(on_one_line, cells), *_changes(change, row.get("kept_factor", math.nan)), share]


def _changes(change: Estimate | None, factor: float) -> list[str]:
    """Return the change by a step's own gradient, and with what momentum makes of it in later steps."""
    if change is None:
        return [MISSING, MISSING]
    return [milli(change), MISSING if math.isnan(factor) else milli(times(change, factor))]

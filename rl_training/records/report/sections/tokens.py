"""Which tokens change entropy: classes of tokens, and the ten tokens that take most.

All numbers are of a step's own gradient, the ledger's column of that name. What momentum makes of them later is not
known by token: the ledger has it for all tokens together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from rl_training.records.pages.writing import MISSING, milli, on_one_line, percent
from rl_training.records.table.estimates import last_of
from rl_training.records.table.series import Run
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import is_significant

TOKEN_CLASS = re.compile(r"^tokens/([^/]+)/([^/]+)/mean_delta_h$")
KINDS = {"entropy": "entropy at the token", "position": "place in its response"}
# Headings of columns:
CHANGE = "1e-3 nats per step"
NOTE = "note"
# Notes:
MAYBE_0 = "the interval contains 0"
UNSEEN = "not seen in these steps"
# Of the section:
TITLE = "Which tokens change entropy"
ANCHOR = "tokens"


def token_classes(run: Run) -> tuple[list[list[str]], int]:
    """Return the table of token classes, from the last running means, and the number of steps that these average.

    Classes of one kind stand together, the one that takes most first.
    """
    rows = list[tuple[str, float, list[str]]]()
    steps = 0
    for kind, name in (match.groups() for match in map(TOKEN_CLASS.match, run.names()) if match):
        metric = f"tokens/{kind}/{name}"
        means = run.finite_rows(f"{metric}/mean_delta_h").tail(1)
        share = run.rows(f"{metric}/share_of_tokens")["value"].reindex(means.index).sum()
        change = last_of(means)
        if share > 0 and change:
            steps = run.measured_steps(f"{metric}/mean_delta_h")
            words = map(on_one_line, (KINDS.get(kind, f"its {kind}"), name.replace("_", " ")))
            rows.append((kind, change.value, [*words, f"{100 * share:.1f}%", milli(change), _note(change, share)]))
    order = list(dict.fromkeys(kind for kind, *_ in rows))
    rows.sort(key=lambda row: (order.index(row[0]), row[1]))
    cells = [cells for *_, cells in rows]
    return [["by", "class", "of all tokens", CHANGE, NOTE], *cells] if cells else [], steps


def top_tokens(run: Run) -> tuple[list[list[str]], int]:
    """Return the table of the tokens that take most entropy, as last recorded, and the number of steps behind it."""
    last = _last_tokens(run)
    if last.empty:
        return [], 0
    cells = [
        [*map(on_one_line, (_text(row), row["example"])), f"{100 * row['share_of_tokens']:.1f}%", milli(_change(row)),
         _share_of_whole(row) or MISSING, _note(_change(row), row["share_of_tokens"])]
        for row in last.to_dict("records")
    ]  # fmt: skip
    headings = ["token", "example", "of all tokens", CHANGE, "share of the whole", NOTE]
    return [headings, *cells], int(last["measured_steps"].iloc[0])


def heaviest(run: Run) -> tuple[str, str] | None:
    """Return the token that takes most entropy, and by how much; None if none was recorded."""
    last = _last_tokens(run)
    if last.empty:
        return None
    row = next((row for row in last.to_dict("records") if is_significant(_change(row))), None)
    steps = int(last["measured_steps"].iloc[0])
    if row is None:
        return "none stands out", f"the interval of every token contains 0 (measured steps: {steps})"
    share = _share_of_whole(row)
    of_whole = f", {share} of what all tokens take" if share else ""
    example = f", as in {row['example']}" if row["example"] else ""
    return f"“{_text(row)}”", f"{milli(_change(row))} thousandths of a nat per step{of_whole}{example}"


def _last_tokens(run: Run) -> pd.DataFrame:
    """Return the rows of the last recorded tokens, each with its last example, the one that takes most first."""
    rows = run.top_tokens
    rows = rows[rows["value"].notna()] if len(rows) else rows
    if rows.empty or "text" not in rows:
        return rows.iloc[:0]
    examples = rows[rows["example"].astype(bool)].groupby("text")["example"].last()
    last = rows[rows["step"] == rows["step"].max()]
    return last.assign(example=last["text"].map(examples).fillna("")).sort_values("value", kind="stable")


def _text(row: Mapping[Any, Any]) -> str:
    return str(row["text"]).replace("\n", "⏎")


def _change(row: Mapping[Any, Any]) -> Estimate:
    return Estimate(row["value"], row["stderr"], int(row["num_samples"]))


def _share_of_whole(row: Mapping[Any, Any]) -> str:
    """Return a token's share of what all tokens take; "" unless that is significant."""
    whole = Estimate(row["whole"], row["whole_stderr"], int(row["num_samples"]))
    return percent(row["value"] / whole.value) if whole.bounds()[1] < 0 else ""


def _note(change: Estimate, share_of_tokens: float) -> str:
    if not share_of_tokens > 0:
        return UNSEEN
    return "" if is_significant(change) or not change.stderr > 0 else MAYBE_0

"""The report's table of token classes, as their probe measured them: which tokens change entropy.

All values are the probe's running means at its last measured step, `tokens/KIND/CLASS/mean_delta_h`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rl_training.records.report.series import Run
from rl_training.records.report.summary import milli

NAMES = re.compile(r"^tokens/([^/]+)/([^/]+)/mean_delta_h$")
HEADINGS = ["by", "class", "of all tokens", "change of entropy, a step"]
KINDS = {
    "entropy": "entropy at the token",
    "position": "place in its response",
    "response": "its response",
    "text": "its text",
}


@dataclass(frozen=True)
class TokenClasses:
    """A row for each class that has tokens; and how many steps were measured, in words."""

    headings: list[str]
    rows: list[list[str]]
    steps: str


def token_classes_of_run(run: Run) -> TokenClasses | None:
    """Returns the table, of classes that have tokens; None where none was measured."""
    rows, steps = [], ""
    for kind, name in (match.groups() for match in map(NAMES.match, run.estimates) if match):
        changes, shares = (
            run.measured(f"tokens/{kind}/{name}/{quantity}") for quantity in ("mean_delta_h", "share_of_tokens")
        )
        known = [step for step, change in changes.items() if math.isfinite(change.value)]
        share = shares[known[-1]].value if known else 0.0
        if share > 0:
            change, steps = changes[known[-1]], changes[known[-1]].reason
            rows.append([KINDS.get(kind, kind), name.replace("_", " "), f"{share:.1%}", milli(change)])
    return TokenClasses(HEADINGS, rows, steps) if rows else None

"""The first lines of a report for programs: `rl-training report RUN --json`. docs/reference/run_folder.md lists them.

A field's meaning does not change without a new VERSION; new fields may come without one.
"""

from __future__ import annotations

from typing import Any

from rl_training.records.files.printable import all_printable
from rl_training.records.report.opening import opening
from rl_training.records.report.standing_out.finding import Finding
from rl_training.records.table.series import Run

VERSION = 1


def first_lines(run: Run) -> dict[str, Any]:
    """Return the verdict on a run, what to change, and what stands out, without control characters."""
    first = opening(run)
    fields = {
        "schema": "rl_training.report",
        "version": VERSION,
        "run": run.name,
        "steps": {"first": run.steps[0], "last": run.last_step, "logged": len(run.steps)},
        "verdict": {
            "kind": first.kind,
            "since": first.since,
            "headline": first.headline,
            "evidence": first.evidence,
        },
        "advice": first.advice.text,
        "settings": [*first.advice.settings],
        "stands_out": [_fields_of(finding) for finding in first.findings],
        "predictions": first.further,
    }
    printable: dict[str, Any] = all_printable(fields)
    return printable


def _fields_of(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.name,
        "since": finding.since,
        "evidence": finding.evidence,
        "advice": finding.advice.text,
        "settings": [*finding.advice.settings],
    }

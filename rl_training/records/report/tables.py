"""Tables of the report's page: token classes, recorded sequences, what is missing, what the probes cost."""

from __future__ import annotations

import math
import re
import statistics
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import pandas as pd

from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import iterate_rollouts
from rl_training.records.report.series import Run
from rl_training.records.report.summary import milli

TOKEN_CLASS = re.compile(r"^tokens/([^/]+)/([^/]+)/mean_delta_h$")
KINDS = {"entropy": "entropy at the token", "position": "place in its response"}
STEPS = 5  # of which sequences are shown, from the first recorded one to the last
OF_A_STEP = 3  # sequences shown, of different prompts


def token_classes(run: Run) -> tuple[list[list[str]], str]:
    """Returns a row for each class that has tokens, with the probe's last running means; and their steps, in words."""
    rows, steps = [], ""
    for kind, name in (match.groups() for match in map(TOKEN_CLASS.match, run.estimates) if match):
        changes, shares = (
            run.known(f"tokens/{kind}/{name}/mean_delta_h"),
            run.measured(f"tokens/{kind}/{name}/share_of_tokens"),
        )
        last = max(changes, default=0)
        share = shares[last].value if changes else 0.0
        if share > 0:
            steps = changes[last].reason
            rows.append([KINDS.get(kind, f"its {kind}"), name.replace("_", " "), f"{share:.1%}", milli(changes[last])])
    return rows, steps


def samples_over_time(run: Run) -> list[Mapping[str, Any]]:
    """Returns the first responses to the first prompts of a few recorded steps; none where none were recorded."""
    found: dict[int, dict[int, Mapping[str, Any]]] = {}
    for row in iterate_rollouts(run.folder / LOGS_FOLDER):
        of_step = found.setdefault(int(row["step"]), {})
        if len(of_step) < OF_A_STEP:
            of_step.setdefault(int(row["prompt_index"]), row)
    steps = sorted(found)
    if len(steps) > STEPS:
        steps = [steps[round(i * (len(steps) - 1) / (STEPS - 1))] for i in range(STEPS)]
    return [row for step in steps for row in found[step].values()]


# Why estimates, or only their error bars ("value" or "error bar"), are missing: one per reason.
Gap = namedtuple("Gap", ["reason", "what", "names", "first_step", "num_steps"])


def gaps(run: Run) -> list[Gap]:
    """Returns the reasons of whatever is nan in probes.jsonl, each once, in the order of their first steps."""
    rows = [
        (e.reason, "value" if math.isnan(e.value) else "error bar", name, step)
        for name, measurements in run.estimates.items()
        for step, e in measurements.items()
        if e.reason and not math.isfinite(e.value + e.stderr)  # else it is a remark
    ]
    found = pd.DataFrame(rows, columns=["reason", "what", "name", "step"]).groupby(["reason", "what"], sort=False)
    listed = [
        Gap(str(reason), str(what), list(of["name"].unique()), int(of["step"].min()), of["step"].nunique())
        for (reason, what), of in found
    ]
    return sorted(listed, key=lambda gap: gap.first_step)


def probe_costs(run: Run) -> list[tuple[str, float, float, int]]:
    """Returns (name, median, largest, number of measured steps) of each `probe_cost/` metric."""
    names = dict.fromkeys(name for line in run.metrics for name in line if name.startswith("probe_cost/"))
    costs = [(name, list(run.logged(name).values())) for name in names]
    return [(name, statistics.median(values), max(values), len(values)) for name, values in costs if values]

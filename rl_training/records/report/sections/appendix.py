"""The tables at the end of a page: evaluations, responses, what is missing and why, and what the probes cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE, PROBES_FILE, iterate_rollouts
from rl_training.records.pages.writing import format_estimate
from rl_training.records.report.sections.own_probes import is_own
from rl_training.records.table.estimates import finite
from rl_training.records.table.series import Run

MAX_SAMPLED_STEPS = 5  # steps whose sequences are shown, spread over the recorded ones
MAX_SEQUENCES_PER_STEP = 3  # that are shown, from different prompts
# Defaults for a sequence that another program recorded.
NOT_RECORDED = {"prompt": "", "response": "", "length": "", **dict.fromkeys(("reward", "advantage", "logp"), math.nan)}


@dataclass(frozen=True)
class EvaluationTable:
    """All numbers of an evaluation of checkpoints."""

    title: str
    steps: list[int]
    rows: dict[str, list[str]]  # by metric, its number at each step


def evaluation_tables(run: Run) -> list[EvaluationTable]:
    tables = []
    for source in run.evaluations:
        by_metric = {metric: run.estimates(metric, source) for metric in run.names(source)}
        steps = sorted({step for estimates in by_metric.values() for step in estimates})
        rows = {
            metric: [format_estimate(estimates.get(step)) for step in steps] for metric, estimates in by_metric.items()
        }
        tables.append(EvaluationTable(source.title, steps, rows))
    return tables


def samples_over_time(run: Run) -> list[Mapping[str, Any]]:
    """Return the first response to each of the first prompts of a few recorded steps; [] if none were recorded."""
    samples: dict[int, dict[int, Mapping[str, Any]]] = {}
    for row in iterate_rollouts(run.folder / LOGS_FOLDER):
        rows = samples.setdefault(int(row["step"]), {})
        if len(rows) < MAX_SEQUENCES_PER_STEP:
            rows.setdefault(row.get("prompt_index", 0), {**NOT_RECORDED, **row})
    places = np.linspace(0, len(samples) - 1, min(len(samples), MAX_SAMPLED_STEPS)).round().astype(int)
    return [row for place in places for row in samples[sorted(samples)[place]].values()]


class Gap(NamedTuple):
    """A reason why something is missing."""

    reason: str
    what: str  # "value" or "error bar"
    names: list[str]  # of metrics
    first_step: int
    num_steps: int


def gaps(run: Run) -> list[Gap]:
    """Return the reasons for every nan in probes.jsonl, each once, sorted by first step."""
    estimates = run.table[run.table["file"] == PROBES_FILE]
    is_nan = ~np.isfinite(estimates["value"] + estimates["stderr"])  # otherwise the reason is only a remark
    has_value_alone = is_own(estimates) & estimates["value"].notna()  # own_probes.py shows it
    rows = estimates[is_nan & (estimates["reason"] != "") & ~has_value_alone]
    rows = rows.assign(what=rows["value"].isna().map({True: "value", False: "error bar"}))
    order = estimates["name"].unique().tolist().index  # order of first appearance
    reasons = rows.groupby(["reason", "what"], sort=False).agg(
        names=("name", lambda names: sorted(names.unique(), key=order)),
        first_step=("step", "min"),
        num_steps=("step", "nunique"),
    )
    in_order = reasons.sort_values("first_step", kind="stable").reset_index()
    return [Gap(*row) for row in in_order.itertuples(index=False, name=None)]


class Cost(NamedTuple):
    """What a metric under probe_cost/ says over the measured steps."""

    name: str
    mean: float
    largest: float
    num_steps: int


def probe_costs(run: Run) -> list[Cost]:
    is_cost = (run.table["file"] == METRICS_FILE) & run.table["name"].str.startswith("probe_cost/")
    table = finite(run.table[is_cost]).groupby("name", sort=False)["value"].agg(["mean", "max", "count"])
    return [Cost(str(name), *row) for name, *row in table.itertuples()]

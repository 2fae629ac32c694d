"""What a page takes from a run's table: sums, means, responses, gaps and costs. Nothing here draws or writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from rl_training.records.evaluated import IN_TRAINING
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE, PROBES_FILE, iterate_rollouts
from rl_training.records.report.estimates import finite, to_rows
from rl_training.records.report.own_probes import is_own
from rl_training.records.report.series import Run
from rl_training.statistics.estimate import Estimate

BEGAN_ELSEWHERE = "the other sums began in the run that this one continues, whose steps are not recorded here"
NO_LATER_BATCH = "one measured step: there is no later batch to compare it with"
SOME_STEPS = "some_steps"  # code of the remark on a sum that lacks steps: probes/running_sum.py
MAX_WINDOW = 5  # logged steps averaged at either end of a run, because a single batch is too noisy
MIN_POINTS = 3  # for a correlation, or a line with a meaningful slope
SAMPLED_STEPS = 5  # steps whose sequences are shown, spread over the recorded ones
# Defaults for a sequence that another program recorded.
NOT_RECORDED = {"prompt": "", "response": "", "length": "", **dict.fromkeys(("reward", "advantage", "logp"), math.nan)}
OF_A_STEP = 3  # sequences shown per step, from different prompts


def measured_by_one_step(run: Run, name: str) -> pd.DataFrame:
    """Return the finite values of a metric of the probe `measured`, per step: divided by the steps that each spans."""
    rows = run.finite_rows(name)
    steps = run.rows("measured/steps")["value"].reindex(rows.index)
    return finite(rows.assign(**{column: rows[column] / steps for column in ("value", "stderr", "low", "high")}))


def of_steps(total: Estimate, of_all: str) -> str:
    """Return what a sum of measured effects is over: by its remark, such as "over 4 of 9 steps", or `of_all`."""
    return total.reason.partition(":")[0] if total.code == SOME_STEPS else of_all


def mean_of_rows(rows: pd.DataFrame) -> Estimate | None:
    """Return the mean of these rows of a metric, whose errors are independent; None if there are none."""
    if rows.empty:
        return None
    stderr = math.sqrt((rows["stderr"] ** 2).sum(skipna=False)) / len(rows)
    return Estimate(rows["value"].mean(), stderr, int(rows["num_samples"].min()))


def first_and_last_means(values: pd.Series[float]) -> list[tuple[float, int, int]]:
    """Return (mean, first step, last step) of the first few values and of the last few; for one value, one entry."""
    window = min(MAX_WINDOW, max(len(values) // 2, 1))
    parts = (values.iloc[:window], values.iloc[window:].tail(window))
    return [(part.mean(), part.index[0], part.index[-1]) for part in parts if len(part)]


def naive_sums(run: Run) -> pd.DataFrame:
    """Return the sum of the naive product at each measured step s, for comparison with the cumulative estimates.

        naive(s) = Σ_{j<s} reuse(j),    naive(first) = 0.

    The change from the first batch to batch s is due to the updates before s. It is 0 wherever the cumulative sums
    start, and nan if they started in another run, or after a step that was not measured. It has no error bar: its error
    is a bias.
    """
    reuse = run.estimates("delta_h/reuse")
    if sums_began_elsewhere(run):
        return to_rows(dict.fromkeys(reuse, Estimate.missing(BEGAN_ELSEWHERE)))
    starts = sum_starts(run) or list(reuse)[:1]
    no_bar = "no error bar: its error is a bias"
    sums = {s: Estimate(0.0, reason=no_bar) if math.isfinite(e.value) else e for s, e in reuse.items() if s in starts}
    for before, step in pairwise(reuse):
        if step in sums or before not in sums:
            continue
        if math.isnan(sums[before].value):
            sums[step] = sums[before]
        elif before != step - 1:
            sums[step] = Estimate.missing(f"step {step - 1} was not measured, so the sum is incomplete")
        elif math.isnan(reuse[before].value):
            sums[step] = Estimate.missing(reuse[before].reason)
        else:
            sums[step] = Estimate(sums[before].value + reuse[before].value, reason=no_bar)
    return to_rows(dict(sorted(sums.items())))


def sum_starts(run: Run) -> list[int]:
    """Return the steps at which the cumulative sums are exactly 0: the first batch, and where a probe started over."""
    sums = run.rows("delta_h/cumulative_measured")
    return sums.index[(sums["value"] == 0) & (sums["stderr"] == 0)].to_list()


def sums_began_elsewhere(run: Run) -> bool:
    """Return whether the cumulative sums started in another run, which this one branched off from."""
    return not sum_starts(run) and not run.finite_rows("delta_h/cumulative_measured").empty


def held_out_rewards(run: Run) -> dict[str, pd.DataFrame]:
    """Return the rewards on prompts that training never sees, by the evaluation that measured them."""
    rewards = {f"evaluation {name}": run.finite_rows("reward", name) for name in (IN_TRAINING, *run.evaluations)}
    return {label: rows for label, rows in rewards.items() if len(rows)}


def measured_changes(run: Run) -> tuple[pd.Series[float], str]:
    """Return the measured change of entropy by each step's update, and a text that says how it was measured."""
    true = run.values("delta_h/true")
    if len(true) >= MIN_POINTS:
        return true, "change on separate sequences"
    entropy = run.values("entropy/token")
    after = entropy.set_axis(entropy.index - 1)
    return (after - entropy).dropna(), "entropy of the next batch minus this one's"


def scaled(values: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the values times the factor that fits them to `truth` by least squares."""
    return values * (truth @ values) / (values @ values)


def samples_over_time(run: Run) -> list[Mapping[str, Any]]:
    """Return the first response to each of the first prompts of a few recorded steps; [] if none were recorded."""
    samples: dict[int, dict[int, Mapping[str, Any]]] = {}
    for row in iterate_rollouts(run.folder / LOGS_FOLDER):
        rows = samples.setdefault(int(row["step"]), {})
        if len(rows) < OF_A_STEP:
            rows.setdefault(row.get("prompt_index", 0), {**NOT_RECORDED, **row})
    places = np.linspace(0, len(samples) - 1, min(len(samples), SAMPLED_STEPS)).round().astype(int)
    return [row for place in places for row in samples[sorted(samples)[place]].values()]


def gaps(run: Run) -> list[Any]:
    """Return the reasons for every nan in probes.jsonl, each once, sorted by first step.

    Each has `reason`, `what` is missing ("value" or "error bar"), `names`, `first_step` and `num_steps`.
    """
    measured = run.table[run.table["source"] == PROBES_FILE]
    is_nan = ~np.isfinite(measured["value"] + measured["stderr"])  # otherwise the reason is only a remark
    has_value_alone = is_own(measured) & measured["value"].notna()  # own_probes.py shows it
    rows = measured[is_nan & (measured["reason"] != "") & ~has_value_alone]
    rows = rows.assign(what=rows["value"].isna().map({True: "value", False: "error bar"}))
    order = measured["name"].unique().tolist().index  # order of first appearance
    listed = rows.groupby(["reason", "what"], sort=False).agg(
        names=("name", lambda names: sorted(names.unique(), key=order)),
        first_step=("step", "min"),
        num_steps=("step", "nunique"),
    )
    return list(listed.sort_values("first_step", kind="stable").reset_index().itertuples(index=False))


def probe_costs(run: Run) -> list[tuple[str, float, float, int]]:
    """Return (name, mean, largest, number of measured steps) of each `probe_cost/` metric."""
    costs = finite(run.table[(run.table["source"] == METRICS_FILE) & run.table["name"].str.startswith("probe_cost/")])
    table = costs.groupby("name", sort=False)["value"].agg(["mean", "max", "count"])
    return [(str(name), *row) for name, *row in table.itertuples()]

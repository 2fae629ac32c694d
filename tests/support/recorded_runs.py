"""The records of an invented run: four estimates and costs at each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from rl_training import Estimate
from rl_training.records.writer import Records


def record_run(folder: Path, steps: Iterable[int], hole: str = "", reason: str = "") -> Path:
    """Write the records of a run measured at `steps`, and return its folder.

    Args:
        hole: If given, estimates that need the previous step are nan with this reason after the first step.
        reason: If given, every estimate is nan with this reason.
    """
    records = Records(folder / "logs")
    for index, step in enumerate(steps):
        nothing = Estimate(math.nan, math.nan, 8, hole or "the first measured step", step - 1)
        lost = nothing if hole and index else None
        estimates = {
            "entropy/token": Estimate(5.0 - index, 0.1, 8),
            "delta_h/forward": Estimate(-0.9, 0.05, 8),
            "delta_h/reuse": Estimate(-(2.0 ** (step - 1)), num_samples=8, reason="no error bar: biased"),
            "delta_h/backward": lost or (Estimate(-1.1, 0.05, 8, about_step=step - 1) if index else nothing),
            "delta_h/cumulative_predicted": lost or Estimate(-1.0 * index, 0.1 if index else 0.0, 8, "", step - 1),
            "delta_h/cumulative_measured": Estimate(-1.0 * index, 0.2 if index else 0.0, 8, "", step - 1),
        }
        if reason:
            estimates = {name: Estimate.missing(reason) for name in estimates}
        records.write_estimates(step, 1, "simple", estimates)
        costs = {"probe_cost/simple_seconds": 0.1 * step, "probe_cost/fraction_of_step": 0.01 * step}
        records.write_metrics(step, {"reward": 0.1 * step, "entropy": 0.5, **costs})
    return folder

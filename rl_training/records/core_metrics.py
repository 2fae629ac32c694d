"""The core metrics of a run, and of an analysis: those that are shown where there is no room for all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# logger.metrics=core, the default, shows only these. Of the numbers that attached probes add to a trainer's own log,
# these are kept too.
CORE = (
    "loss", "reward", "reward_std", "frac_reward_zero_std", "grad_norm", "learning_rate", "completions/mean_length",
    "entropy", "entropy/token", "delta_h/forward", "delta_h/forward_se", "delta_h/cumulative_predicted",
    "delta_h/cumulative_measured", "measured/delta_h", "measured/delta_h_se", "gns/batch_ratio",
    "ess/advantage_fraction", "probe_cost/fraction_of_step", "eval_reward",
)  # fmt: skip
CORE_OF_ANALYSIS = ("deltaH1", "deltaH_true", "deltaH_odd", "paired_error", "H_orig", "ESS", "avg_reward")


def core_numbers(analysis: Mapping[str, Any]) -> dict[str, float]:
    """Return an analysis's available core numbers under offline/…, for dashboards."""
    results = analysis["results"]
    return {f"offline/{name}": results[name] for name in CORE_OF_ANALYSIS if math.isfinite(results.get(name, math.nan))}

"""Records with TRL's log lines, whose numbers a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl_training import Estimate
from rl_training.records.made_by import MADE_BY, TRL
from rl_training.records.writer import Records

Curve = Callable[[int], float]
SETTINGS: dict[str, Any] = {MADE_BY: TRL, "sequences_per_step": 128, "trainer": {
    "class": "GRPOTrainer", "num_generations": 8, "learning_rate": 1e-4, "max_completion_length": 64,
    "gradient_accumulation_steps": 8, "max_grad_norm": 1.0,
}}  # fmt: skip
# A step of a healthy run: rewards of 0 and 1, most prompts have both, and responses end.
LOGGED: dict[str, float] = {
    "reward": 0.5, "reward_std": 0.5, "entropy": 0.5, "frac_reward_zero_std": 0.25, "learning_rate": 1e-4,
    "grad_norm": 0.5, "completions/mean_length": 20.0, "completions/clipped_ratio": 0.0,
}  # fmt: skip


def log_run(
    folder: Path,
    steps: int = 40,
    estimates: Mapping[str, Callable[[int], Estimate | None]] | None = None,
    settings: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
    **curves: Curve | float,
) -> Path:
    """Write a run whose steps log LOGGED, except for the given curves, and return its folder.

    Args:
        estimates: By name, the estimate of a probe as a function of the step; None where it measures nothing.
        settings: Fields of GRPOConfig in addition to SETTINGS.
        others: Further settings, beside those of the trainer.
        curves: Logged values as functions of the step, or constants. Write "__" for "/" in their names.
    """
    records = Records(folder / "logs")
    records.start(0, {**SETTINGS, **(others or {}), "trainer": {**SETTINGS["trainer"], **(settings or {})}})
    for step in range(1, steps + 1):
        metrics = {name.replace("__", "/"): curve(step) if callable(curve) else curve for name, curve in curves.items()}
        records.write_metrics(step, {**LOGGED, **metrics})
        if estimates:
            measured = {name: estimate for name, of in estimates.items() if (estimate := of(step)) is not None}
            records.write_estimates(step, 1, "measured", measured)
    return folder


def noisy(curve: Curve, deviation: float, seed: int = 0) -> Curve:
    """Return the curve plus independent normal noise."""
    draws = np.random.default_rng(seed).normal(0.0, deviation, 1000)
    return lambda step: curve(step) + float(draws[step])

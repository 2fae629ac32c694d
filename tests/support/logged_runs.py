"""The records of a trainer that logs what TRL logs, with numbers that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl_training import Estimate
from rl_training.records.jsonl import Records

Curve = Callable[[int], float]
SETTINGS: dict[str, Any] = {"sequences_per_step": 128, "trainer": {
    "class": "GRPOTrainer", "num_generations": 8, "learning_rate": 1e-4, "max_completion_length": 64,
    "gradient_accumulation_steps": 8, "max_grad_norm": 1.0,
}}  # fmt: skip
# A step of a healthy run: rewards of 0 and 1, most prompts with both, responses that end.
LOGGED: dict[str, float] = {
    "reward": 0.5, "reward_std": 0.5, "entropy": 0.5, "frac_reward_zero_std": 0.25, "learning_rate": 1e-4,
    "grad_norm": 0.5, "completions/mean_length": 20.0, "completions/clipped_ratio": 0.0,
}  # fmt: skip


def log_run(
    folder: Path,
    steps: int = 40,
    estimates: Mapping[str, Callable[[int], Estimate]] | None = None,
    settings: Mapping[str, Any] | None = None,
    **curves: Curve | float,
) -> Path:
    """Return the folder of a run whose step s logs LOGGED, and `curves` of s in their place ("/" is written "__").

    estimates  what probes measured at a step, by name
    settings   fields of GRPOConfig beside those of SETTINGS
    """
    records = Records(folder / "logs")
    records.start(0, {**SETTINGS, "trainer": {**SETTINGS["trainer"], **(settings or {})}})
    for step in range(1, steps + 1):
        metrics = {name.replace("__", "/"): curve(step) if callable(curve) else curve for name, curve in curves.items()}
        records.write_metrics(step, {**LOGGED, **metrics})
        if estimates:
            records.write_estimates(step, 1, "measured", {name: of(step) for name, of in estimates.items()})
    return folder


def noisy(curve: Curve, deviation: float, seed: int = 0) -> Curve:
    """Return the curve with independent normal noise."""
    draws = np.random.default_rng(seed).normal(0.0, deviation, 1000)
    return lambda step: curve(step) + float(draws[step])

"""Merges what TRL logs of several generations for one rollout, so that a step has one value per metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from trl import GRPOTrainer

Metrics = Mapping[str, Sequence[float]]  # what TRL has logged in an attempt, by name


def log_attempts(
    trainer: GRPOTrainer, attempts: Sequence[Metrics], num_sequences: Sequence[int], buffer_metrics: dict[str, float]
) -> None:
    """Add one value per name to the trainer's metrics: those of all attempts merged, and the buffer's own.

    Args:
        trainer: The trainer.
        attempts: What TRL has logged in each attempt.
        num_sequences: The number of sequences of each attempt, on all ranks.
        buffer_metrics: What the buffer itself measures, by name.
    """
    lengths = [logged["completions/mean_length"][-1] for logged in attempts]
    tokens = sum(round(length * count) for length, count in zip(lengths, num_sequences, strict=True))
    merged = merge_metrics(attempts, num_sequences) | buffer_metrics | {"buffer/generated_tokens": float(tokens)}
    for name, value in merged.items():
        trainer._metrics["train"][name].append(value)
    trainer._metrics["train"]["num_tokens"] = list(attempts[-1]["num_tokens"])  # a running count, not an average


def merge_metrics(attempts: Sequence[Metrics], num_sequences: Sequence[int]) -> dict[str, float]:
    """Merge what TRL logged in each attempt into one number per name: the mean over the sequences of all attempts.

    Minima and maxima are merged by min and max. A standard deviation becomes the mean of the attempts' own values.
    `…_terminated_length` describes only sequences that ended by themselves, so it is averaged over those.
    """
    merged = {}
    num_terminated = [
        n * (1 - attempt["completions/clipped_ratio"][-1]) for attempt, n in zip(attempts, num_sequences, strict=True)
    ]
    for name in {name: None for attempt in attempts for name in attempt}:
        values = np.array([attempt.get(name, [math.nan])[-1] for attempt in attempts])
        weights = np.array(num_terminated if name.endswith("_terminated_length") else num_sequences)
        known = (weights > 0) & ~np.isnan(values)
        kind = name.rpartition("/")[2].partition("_")[0]
        if not known.any():
            merged[name] = math.nan
        elif kind in ("min", "max"):
            merged[name] = float(getattr(values[known], kind)())
        else:
            merged[name] = float(np.average(values[known], weights=weights[known]))
    return merged

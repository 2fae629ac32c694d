"""A run's output and its readers: records (here, as pandas DataFrames), checkpoints, dashboards, the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_training.extras import require_extra

if TYPE_CHECKING:
    from rl_training.records.frames import (
        analysis_results,
        evaluations,
        find_runs,
        metrics,
        probe_logs,
        probes,
        read_probe_log,
        rollouts,
    )

__all__ = [
    "analysis_results", "evaluations", "find_runs", "metrics", "probe_logs", "probes", "read_probe_log", "rollouts",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Returns a public name, imported on first use: writing records needs no pandas."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with require_extra():
        from rl_training.records import frames
    return getattr(frames, name)

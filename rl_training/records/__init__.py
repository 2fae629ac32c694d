"""What a run leaves in its folder, and its readers. Read in this order.

folder.py        what lies where, by name
Written:         jsonl.py (logs/metrics.jsonl and probes.jsonl, line by line), config.py, provenance.py, failure.py,
                 checkpoint_states.py (what probes keep in the trainer's checkpoints), evaluated.py
Read:            frames.py (all of it as pandas DataFrames: the names that this package exports), checkpoints.py
                 (which there are, and whether they are whole)
Shown:           report/ (the page of a run), compare/ (of several), workspace.py (the panels of a dashboard)
files/           how each file is written and read: whole or absent, by one process, without secrets, and never run
"""

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
    """Return a public name, imported on first use: writing records needs no pandas."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with require_extra():
        from rl_training.records import frames
    return getattr(frames, name)

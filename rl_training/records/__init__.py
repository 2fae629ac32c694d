"""A run's output and its readers.

jsonl.py         what a training writes: metrics.jsonl, probes.jsonl; config.py, provenance.py, masking.py
frames.py        what was written, as pandas DataFrames: the names that this package exports
checkpoints.py   which checkpoints there are and whether they are whole; checkpoint_states.py, what probes keep in them
evaluated.py     what evaluations left; workspace.py, the panels of dashboards
report/          the page of a run     compare/   the page of several
folder.py, lock.py, atomic_write.py, links.py, pickles.py, unpack.py, stored_yaml.py, printable.py
                 files that are whole or absent, of one process at a time, and read without running anything
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

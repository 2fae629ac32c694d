"""What a run leaves, and how it is looked at: records, checkpoints, dashboards, the report.

from rl_training.records import evaluations, find_runs, metrics, probes    # as pandas DataFrames
"""

from rl_training.records.frames import evaluations, find_runs, metrics, probes

__all__ = ["evaluations", "find_runs", "metrics", "probes"]

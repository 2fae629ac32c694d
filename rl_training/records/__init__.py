"""What a run leaves, and how it is looked at: records, checkpoints, dashboards, the report.

from rl_training.records import evaluations, find_runs, metrics, probes, rollouts    # as pandas DataFrames
"""

from rl_training.records.frames import evaluations, find_runs, metrics, probes, rollouts
from rl_training.records.looks import looks
from rl_training.records.probe_logs import probe_logs, read_probe_log

__all__ = ["evaluations", "find_runs", "looks", "metrics", "probe_logs", "probes", "read_probe_log", "rollouts"]

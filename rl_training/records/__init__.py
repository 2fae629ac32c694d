"""The files of a run folder: names, writers, readers and pages. Read in this order.

folder.py        names of the files and folders
claim.py         locks a folder for one training

Written:
writer.py                logs/metrics.jsonl, probes.jsonl and the like, line by line
config.py                config.yaml
provenance.py            where a run comes from
failure.py               why measuring ended
checkpoint_states.py     states of probes in the trainer's checkpoints
evaluated.py             evaluations of checkpoints, which it also reads
json_values.py           numbers as JSON has them
hydra_text.py            texts to type for Hydra

Read:
jsonl.py                 the lines that writer.py writes
frames.py, analyses.py   a run, and analyses of its checkpoints, as DataFrames: the names that this package exports
checkpoints.py           finds checkpoints
checkpoint_flaws.py      what is missing or damaged in one
made_by.py               what made a run
training_settings.py     which of its settings affect training

Shown:
table/                   a run's records as one table
pages/                   how any page is made
report/                  the page of one run
compare/                 the page of several
report_command.py        makes either
first_order.py           whether an analysis's prediction holds, in words
dashboard.py             a W&B dashboard
core_metrics.py          what is shown where there is no room for all

files/           safe access to single files: atomic writes, locks, masked secrets, readers that run no code
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_training.errors import require_extra

if TYPE_CHECKING:
    from rl_training.records.analyses import analysis_results, probe_logs, read_probe_log
    from rl_training.records.frames import evaluations, find_runs, metrics, probes, rollouts

__all__ = [
    "analysis_results", "evaluations", "find_runs", "metrics", "probe_logs", "probes", "read_probe_log", "rollouts",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because writing records needs no pandas."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with require_extra():
        from rl_training.records import analyses, frames
    return getattr(analyses if hasattr(analyses, name) else frames, name)

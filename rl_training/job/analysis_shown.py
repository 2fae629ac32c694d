"""How checkpoint analyses are shown: on a page of their own, in the run's report, in its dashboards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rl_training.job.analysis_plan import run_of
from rl_training.job.loggers import loggers_of
from rl_training.records.analyses import read_analysis
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.report import write_report
from rl_training.records.report.checkpoint_analyses import core_numbers, describe_analyses, write_analyses_page
from rl_training.records.report.series import read_run


def write_pages(results: Mapping[Path, Path]) -> list[Path]:
    """Returns the rewritten pages of each run's analyses of this name; the run's report is rewritten too.

    results  by checkpoint, the file with its numbers
    """
    folders = {result.parents[1]: run_of(checkpoint) for checkpoint, result in results.items()}
    pages = []
    for folder, run in folders.items():
        logged = run if run is not None and (run / LOGS_FOLDER / METRICS_FILE).is_file() else None
        section = describe_analyses(folder, read_run(logged) if logged else None)
        pages.append(write_analyses_page(folder, section))
        if logged:
            write_report(logged, {folder.resolve(): section})
    return pages


def tell_dashboards(results: Mapping[Path, Path]) -> None:
    """Sends the core numbers of these analyses to the dashboards of each run, at the steps of their checkpoints."""
    for checkpoint, result in results.items():
        run, analysis = run_of(checkpoint), read_analysis(result)
        for dashboard in loggers_of(run, analysis["settings"]["run"]) if run is not None else ():
            dashboard.start(after_step=0)
            dashboard.log(analysis["step"], core_numbers(analysis))
            dashboard.finish(pictures=[])

"""Runs one checkpoint analysis with everything that its settings ask for, and writes its results and pages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_training.offline.analysis import Analysis, analyze
from rl_training.offline.kernel.at_checkpoint import add_kernel
from rl_training.offline.kernel.checks import refuse_other_loss
from rl_training.offline.phases import explain_out_of_memory
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.results import print_table, write_log, write_result
from rl_training.offline.settings import Settings
from rl_training.offline.sweep import sweep_tables
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import has_steps
from rl_training.records.report import write_report
from rl_training.records.report.sections.checkpoint_analyses import describe_analyses, write_analyses_page
from rl_training.records.table.reading import read_run


def analyze_and_write(
    restored: RestoredTrainer, path: Path, settings: Settings, values: Mapping[str, Any], start: float
) -> Analysis:
    """Analyze a restored trainer and write log and results. Collective.

    The results are written last, so their file implies a complete analysis. With a kernel they are also written before
    it, without its numbers, so that a kernel that fails does not lose them.

    Args:
        path: File of the results. The kernel goes to its folder, the log to the folder of all analyses.
        values: The settings to record, without secrets.
        start: When restoring began, from time.perf_counter.

    Raises:
        UserError: The settings ask for a kernel, which the trainer's loss or model does not have.
    """
    if settings.kernel.enabled:
        refuse_other_loss(restored.trainer)  # before anything is sampled
    seconds = {"load": time.perf_counter() - start}
    analysis = analyze(restored, settings)
    if settings.kernel.enabled:
        if restored.rank == 0:
            write_result(path, restored, analysis, values)
        with explain_out_of_memory("kernel"):
            analysis.add(add_kernel(restored, analysis, settings.kernel, path.parent / "kernel"))
    with explain_out_of_memory("sweep"):
        analysis.tables.update(sweep_tables(restored, analysis, settings))
    analysis.seconds.update(seconds | {"all": time.perf_counter() - start})
    log = write_log(path.parents[1] / LOGS_FOLDER, restored, analysis, settings.log, values)
    if restored.rank == 0:
        write_result(path, restored, analysis, values, log)
        print_table(analysis, restored, path)
    restored.passes.reduction.close()
    return analysis


def write_pages(folder: Path, run: Path | None) -> None:
    """Rewrite the page of the analyses in a folder, print its path, and rewrite the report of their run.

    Args:
        folder: Folder of all analyses of one name.
        run: Run folder; None for checkpoints outside a run. Without a logged step it has no report.
    """
    logged = run if run is not None and has_steps(run) else None
    section = describe_analyses(folder, read_run(logged) if logged else None)
    print(f" {write_analyses_page(folder, section)}")
    if logged:
        write_report(logged)

"""How checkpoint analyses are shown: on a page of their own, in the run's report, in its dashboards."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.utils import logging

from rl_training.hosts.trl.trainer import DrGRPOConfig
from rl_training.job.analysis_plan import run_of
from rl_training.job.loggers import LOGGERS
from rl_training.records.analyses import read_analysis
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.report import write_report
from rl_training.records.report.checkpoint_analyses import core_numbers, describe_analyses, write_analyses_page
from rl_training.records.report.series import read_run

logger = logging.get_logger(__name__)


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
        run = run_of(checkpoint)
        if run is not None:
            _tell_dashboards_of(run, read_analysis(result))


def _tell_dashboards_of(run: Path, analysis: Mapping[str, Any]) -> None:
    config = analysis["settings"]["run"]
    trainer = config["trainer"]
    asked = trainer.get("report_to") or []
    for kind in LOGGERS:
        package = kind.__name__.removesuffix("Logger").lower()
        if package not in asked:
            continue
        if find_spec(package) is None:
            logger.warning(f"{package} is not installed here: this analysis is not sent to its dashboard")
            continue
        name = trainer.get("run_name") or run.resolve().name
        dashboard = kind(run, trainer.get("project", DrGRPOConfig.project), name, config)
        dashboard.start(after_step=0)
        dashboard.log(analysis["step"], core_numbers(analysis))
        dashboard.finish(pictures=[])

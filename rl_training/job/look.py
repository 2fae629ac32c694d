"""offline.py: from its configuration to looks at checkpoints, one after another, and what they leave behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import PartialState
from omegaconf import DictConfig, OmegaConf
from transformers.utils import logging

from rl_training.job.build import build_standing
from rl_training.job.run_settings import run_settings
from rl_training.live.trainer import DrGRPOConfig
from rl_training.offline import probe
from rl_training.offline.kernel_report import add_kernel
from rl_training.offline.kernel_types import KernelSettings
from rl_training.offline.logs import LogSettings, write_log
from rl_training.offline.results import print_table, write_result
from rl_training.offline.sweep import SweepSettings, refuse_sweep, sweep_tables
from rl_training.records.checkpoints import checkpoints_named
from rl_training.records.folder import CONFIG_FILE, LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.loggers import LOGGERS
from rl_training.records.looks import RESULT_FILE, read_look
from rl_training.records.report import write_report
from rl_training.records.report.looks import core_numbers, write_looks_page
from rl_training.records.report.series import read_run

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class _Asked:
    """All that conf/offline.yaml asks for, checked."""

    look: probe.Settings
    kernel: KernelSettings | None
    sweep: SweepSettings
    log: LogSettings


def look_at_checkpoints(cfg: DictConfig) -> list[Path]:
    """Looks at each checkpoint that `cfg` names, prints a table of each, and returns the files with the results.

    Their page, and the report of a run, are made anew if asked for. Raises ValueError for whatever the user got wrong;
    where the checkpoints can tell, before anything is sampled.
    """
    own: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    asked = _Asked(
        settings_from(own), kernel_settings_from(own), SweepSettings(**own["sweep"]), LogSettings(**own["log"])
    )
    refuse_sweep(asked.sweep, asked.look)
    named = own["checkpoint"]
    found = checkpoints_named(named if isinstance(named, str) else list(named), Path(cfg.runs_dir))
    written = [_look_at(checkpoint, cfg, own, asked) for checkpoint in found]
    if PartialState().is_main_process:
        for page in _show(found, written) if cfg.report else ():
            print(f" {page}")
        for checkpoint, path in zip(found, written, strict=True):
            run = _run_of(checkpoint)
            if run is not None and cfg.dashboards:
                _tell_dashboards(run, read_look(path))
    PartialState().wait_for_everyone()
    return written


def _look_at(checkpoint: Path, cfg: DictConfig, own: Mapping[str, Any], asked: _Asked) -> Path:
    """Returns the file with the results of one look."""
    start = time.perf_counter()
    run = run_settings(checkpoint, list(cfg.run))
    standing = build_standing(run, checkpoint, cfg.learning_rate)
    seconds = {"load": time.perf_counter() - start}
    look = probe.look(standing, asked.look)
    path = _folder(cfg, checkpoint) / RESULT_FILE
    if asked.kernel is not None:
        estimator = asked.look.first_order.estimator
        look.results.update(add_kernel(standing, look, asked.kernel, path.parent / "kernel", estimator))
    look.tables.update(sweep_tables(standing, look, asked.look, asked.sweep))
    look.seconds.update(seconds | {"all": time.perf_counter() - start})
    asked_for = {"offline": own, "run": OmegaConf.to_container(run, resolve=True)}
    log = write_log(path.parents[1] / LOGS_FOLDER, standing, look, asked.log, asked_for)
    if standing.rank == 0:
        write_result(path, standing, look, asked_for, log)
        print_table(look, standing, path)
    del standing, look
    gc.collect()
    return path


def _show(checkpoints: list[Path], results: list[Path]) -> list[Path]:
    """Returns the pages that it wrote: of the looks of each run under this name; the run's own report is made anew."""
    folders = {result.parents[1]: _run_of(checkpoint) for checkpoint, result in zip(checkpoints, results, strict=True)}
    pages = []
    for folder, run in folders.items():
        logged = run is not None and (run / LOGS_FOLDER / METRICS_FILE).is_file()
        pages.append(write_looks_page(folder, read_run(run) if logged and run else None))
        if logged and run is not None:
            write_report(run)
    return pages


def _tell_dashboards(run: Path, look: Mapping[str, Any]) -> None:
    """Gives the dashboards of a run the core numbers of a look, at the step of its checkpoint."""
    config = look["settings"]["run"]
    trainer = config["trainer"]
    asked = trainer.get("report_to") or []
    for kind in LOGGERS:
        package = kind.__name__.removesuffix("Logger").lower()
        if package not in asked:
            continue
        if find_spec(package) is None:
            logger.warning(f"{package} is not installed here: its dashboard is not told of this look")
            continue
        name = trainer.get("run_name") or run.resolve().name
        dashboard = kind(run, trainer.get("project", DrGRPOConfig.project), name, config)
        dashboard.start(after_step=0)
        dashboard.log(look["step"], core_numbers(look))
        dashboard.finish(pictures=[])


def settings_from(own: Mapping[str, Any]) -> probe.Settings:
    """Returns the settings of a look, from the values of conf/offline.yaml."""
    return probe.Settings(
        evaluation=probe.Evaluation(**own["evaluation"]),
        update=probe.Updating(**own["update"]),
        first_order=probe.FirstOrderSettings(**own["first_order"]),
        truth=probe.TruthSettings(**own["truth"]),
        conditioning=own["conditioning"],
        memory=probe.Memory(**own["memory"]),
    )


def kernel_settings_from(own: Mapping[str, Any]) -> KernelSettings | None:
    """Returns the settings of the kernel, None where it is not asked for."""
    settings = dict(own["kernel"])
    return KernelSettings(**settings) if settings.pop("enabled") else None


def _run_of(checkpoint: Path) -> Path | None:
    """Returns the run that a checkpoint lies in, None where it lies in none."""
    run = checkpoint.resolve().parents[1]
    return run if (run / CONFIG_FILE).is_file() else None


def _folder(cfg: DictConfig, checkpoint: Path) -> Path:
    """Returns where the results go: RUN/offline/NAME/checkpoint-N, or beside a checkpoint that lies in no run."""
    run = _run_of(checkpoint) or checkpoint.resolve().parent
    return Path(cfg.output or run / "offline") / str(cfg.name) / checkpoint.name

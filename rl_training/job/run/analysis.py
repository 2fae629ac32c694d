"""Runs the checkpoint analyses of `rl-training analyze` one after another, then writes their pages and dashboards."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from omegaconf import OmegaConf

from rl_training.errors import UserError
from rl_training.job.configuration.prepare import PreparedAnalysis
from rl_training.job.configuration.run_settings import run_settings
from rl_training.job.configuration.stored import load_settings, unmarked
from rl_training.job.objects.dashboards import loggers_of
from rl_training.job.objects.trainer import build_restored
from rl_training.offline.analyze_and_write import analyze_and_write, write_pages
from rl_training.records.analyses import RESULT_FILE, read_analysis
from rl_training.records.checkpoint_states import PROBE_STATES, read_notes
from rl_training.records.checkpoints import resolve_checkpoints
from rl_training.records.core_metrics import core_numbers
from rl_training.records.files.links import refuse_links_out
from rl_training.records.files.masking import without_secrets
from rl_training.records.folder import CONFIG_FILE, OFFLINE, checkpoint_name, run_of
from rl_training.records.made_by import is_of_attached_run

OF_DASHBOARDS = ("report_to", "project", "run_name")  # fields of the trainer that say where numbers are shown


def analyze_checkpoints(prepared: PreparedAnalysis) -> list[Path]:
    """Analyze each checkpoint that the settings name and print a table for each. Collective.

    If `report` is set, rewrite the page of the analyses and the run's report. If `dashboards` is set, send the core
    numbers to the run's dashboards.

    Returns:
        The result files.

    Raises:
        UserError: If checkpoints and settings do not match; before anything is sampled if the checkpoints reveal it.
    """
    values = prepared.values
    results = result_files(prepared)
    for checkpoint, path in results.items():
        _analyze_checkpoint(checkpoint, path, prepared)
    if PartialState().is_main_process:
        if values["report"]:
            runs = {result.parents[1]: run_of(checkpoint) for checkpoint, result in results.items()}
            for folder, run in runs.items():
                write_pages(folder, run)
        if values["dashboards"]:
            _log_to_dashboards(results)
    PartialState().wait_for_everyone()
    return list(results.values())


def result_files(prepared: PreparedAnalysis) -> dict[Path, Path]:
    """Return the result file of each checkpoint: in RUN/offline, or in `offline` next to a checkpoint outside a run."""
    values = prepared.values
    named = values["checkpoint"]
    if not named:
        raise UserError(f"checkpoint={named} names no checkpoint: give RUN, RUN/training_state or a checkpoint folder")
    for path in [named] if isinstance(named, str) else named:
        if is_attached(Path(path)):
            raise UserError(
                f"{path} belongs to a trainer made by a script: in Python, after `from rl_training import analyze`, "
                "analyze(trainer, CHECKPOINT, FOLDER) with the script's own trainer"
            )
    checkpoints = resolve_checkpoints(named if isinstance(named, str) else list(named), Path(values["runs_dir"]))
    folders = {}
    for checkpoint in checkpoints:
        owner = run_of(checkpoint) or checkpoint.resolve().parent
        home = Path(values["output"] or owner / OFFLINE)
        refuse_links_out(*((home, prepared.folder_name) if values["output"] else (owner, OFFLINE)))
        folders[checkpoint] = home / prepared.folder_name / checkpoint_name(checkpoint)
    folder, times = Counter(folders.values()).most_common(1)[0]
    if times > 1:
        raise UserError(f"{times} checkpoints would write their results to {folder}: analyze each run separately")
    return {checkpoint: folder / RESULT_FILE for checkpoint, folder in folders.items()}


def is_attached(named: Path) -> bool:
    """Return whether this is a run of a trainer made by a script, or a checkpoint of one."""
    is_checkpoint = named.is_dir() and (named / PROBE_STATES).is_file()
    return is_of_attached_run(named) or (is_checkpoint and bool(read_notes(named).get("run")))


def _analyze_checkpoint(checkpoint: Path, path: Path, prepared: PreparedAnalysis) -> None:
    """Restore a run's trainer at one checkpoint, analyze the checkpoint and write the results to `path`."""
    start = time.perf_counter()
    values = prepared.values
    run = run_settings(checkpoint, values["run"])
    restored = build_restored(run, checkpoint, values["learning_rate"])
    recorded = without_secrets({"offline": values, "run": unmarked(OmegaConf.to_container(run, resolve=True))})
    analyze_and_write(restored, path, prepared.settings, recorded, start)
    del restored
    gc.collect()  # reference cycles would keep this model in memory while the next one is loaded


def _log_to_dashboards(results: Mapping[Path, Path]) -> None:
    """Send the core numbers of these analyses to the dashboards of each run, at the steps of their checkpoints.

    The command chooses the dashboards. The settings that they show remain those that the run trained with.
    """
    for checkpoint, result in results.items():
        run = run_of(checkpoint)
        if run is None:
            continue
        analysis = read_analysis(result)
        config: dict[str, Any] = unmarked(OmegaConf.to_container(load_settings(run / CONFIG_FILE), resolve=True))
        asked = analysis["settings"]["run"].get("trainer", {})
        config["trainer"] = config.get("trainer", {}) | {key: asked[key] for key in OF_DASHBOARDS if key in asked}
        for dashboard in loggers_of(run, config):
            dashboard.start(after_step=0)
            dashboard.log(analysis["step"], core_numbers(analysis))
            dashboard.finish(pictures=[])

"""offline.py: from its configuration to checkpoint analyses, one after another, and what they leave behind."""

from __future__ import annotations

import gc
import time
from pathlib import Path

from accelerate import PartialState
from omegaconf import DictConfig, OmegaConf
from transformers.utils import logging

from rl_training.job.analysis_plan import Plan, read_plan
from rl_training.job.analysis_shown import tell_dashboards, write_pages
from rl_training.job.build import build_restored
from rl_training.job.run_settings import run_settings
from rl_training.offline import probe
from rl_training.offline.interventions import intervention_tables
from rl_training.offline.kernel_report import add_kernel
from rl_training.offline.logs import write_log
from rl_training.offline.phases import short_memory_says_what_to_lower
from rl_training.offline.results import print_table, write_result
from rl_training.offline.sweep import sweep_tables
from rl_training.records.folder import LOGS_FOLDER

logger = logging.get_logger(__name__)

OF_LATER_STEPS = ("trainer.epsilon", "trainer.epsilon_high", "trainer.delta")  # bounds of ratios, which are all 1


def analyse_checkpoints(cfg: DictConfig) -> list[Path]:
    """Analyses each checkpoint that `cfg` names, prints a table of each, and returns the files with the results.

    Their page and the report of a run are rewritten if asked for. Raises ValueError for whatever the user got wrong,
    before anything is sampled where the checkpoints reveal it.
    """
    plan = read_plan(cfg)
    for word in plan.values["run"]:
        if word.partition("=")[0] in OF_LATER_STEPS and PartialState().is_main_process:
            logger.warning(f"{word} has no effect here: the first step on its responses clips nothing")
    for checkpoint in plan.results:
        _analyse(checkpoint, plan)
    if PartialState().is_main_process:
        for page in write_pages(plan.results) if plan.values["report"] else ():
            print(f" {page}")
        if plan.values["dashboards"]:
            tell_dashboards(plan.results)
    PartialState().wait_for_everyone()
    return list(plan.results.values())


def _analyse(checkpoint: Path, plan: Plan) -> None:
    """Analyses one checkpoint; the log is written first, then the results, so results imply a complete analysis."""
    start = time.perf_counter()
    run = run_settings(checkpoint, plan.values["run"])
    asked = plan.interventions
    restored = build_restored(run, checkpoint, plan.values["learning_rate"], asked.needs_reference)
    seconds = {"load": time.perf_counter() - start}
    analysis = probe.analyse(restored, plan.analysis)
    path = plan.results[checkpoint]
    if plan.kernel is not None:
        with short_memory_says_what_to_lower("kernel"):
            analysis.results.update(add_kernel(restored, analysis, plan.kernel, path.parent / "kernel"))
    with short_memory_says_what_to_lower("sweep"):
        analysis.tables.update(sweep_tables(restored, analysis, plan.analysis, plan.sweep))
    if asked.named:
        begun = time.perf_counter()
        with short_memory_says_what_to_lower("interventions"):
            seeds = plan.sweep.update_seeds
            analysis.tables.update(intervention_tables(restored, analysis, plan.analysis, seeds, asked))
        seconds["interventions"] = time.perf_counter() - begun
    analysis.seconds.update(seconds | {"all": time.perf_counter() - start})
    settings = {"offline": plan.values, "run": OmegaConf.to_container(run, resolve=True)}
    log = write_log(path.parents[1] / LOGS_FOLDER, restored, analysis, plan.log, settings)
    if restored.rank == 0:
        write_result(path, restored, analysis, settings, log)
        print_table(analysis, restored, path)
    del restored, analysis
    gc.collect()  # a model in a reference cycle would stay in memory beside the next checkpoint's

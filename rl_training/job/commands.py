"""The commands train, analyze and evaluate: compose and check the configuration, then make and run its objects."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from rl_training.errors import UserError
from rl_training.job.configuration.composition import run_composed
from rl_training.job.configuration.groups import OF_EVALUATION
from rl_training.job.configuration.loggers import add_all_loggers
from rl_training.job.configuration.overrides import (
    is_of_run,
    refuse_several_options,
    root_key,
    settings_of_analyses,
)
from rl_training.job.configuration.prepare import prepare_analysis, prepare_evaluation, prepare_run
from rl_training.job.configuration.run_settings import resolve_branch
from rl_training.job.configuration.sweep import analysis_of_job, evaluation_of_job, name_job_folder


def train() -> None:
    """Train with GRPO and probes, and write the report."""
    is_branch = any(root_key(word) == "branch" for word in sys.argv[1:])  # a branch takes its settings from its run
    run_composed("train", _train, lambda word: not is_branch and root_key(word) != "trainer")


def _train(cfg: DictConfig, overrides: list[str]) -> None:
    cfg = resolve_branch(cfg, overrides)
    refuse_several_options(overrides)
    add_all_loggers(cfg, overrides)
    name_job_folder(cfg, overrides)
    prepared = prepare_run(cfg)
    with fast_imports():
        from rl_training.job.run.training import build_run

    run = build_run(prepared)
    run.train()
    run.report()
    run.end()


def analyze() -> None:
    """Analyze checkpoints: predict and measure what the next step of each does to entropy."""
    run_composed("offline", _analyze, lambda word: not is_of_run(word))


def _analyze(cfg: DictConfig, overrides: list[str]) -> None:
    cfg = OmegaConf.masked_copy(cfg, list(settings_of_analyses().keys() & cfg.keys()))
    cfg.run = [*cfg.run, *filter(is_of_run, overrides)]
    if job := analysis_of_job(overrides):
        cfg.name = f"{cfg.name},{job}"
    prepared = prepare_analysis(cfg)
    with fast_imports():
        from rl_training.job.run.analysis import analyze_checkpoints

    analyze_checkpoints(prepared)


def evaluate() -> None:
    """Evaluate the checkpoints of a run, and exit with 1 if one failed; in a sweep, after the last job.

    Raises:
        UserError: For a setting that an evaluation does not have.
    """
    problems: list[str] = []
    for word in sys.argv[1:]:
        if root_key(word) == "trainer":  # it would be ignored
            raise UserError(
                f"{word}: an evaluation makes no trainer; evaluation.temperature and evaluation.max_completion_length "
                "replace the run's"
            )
    run_composed(
        "evaluate",
        lambda cfg, overrides: problems.extend(_evaluate(cfg, overrides)),
        # conf/evaluate.yaml cannot list the run's own settings, nor the names of metrics.
        lambda word: root_key(word) not in (*OF_EVALUATION, "metrics"),
    )
    if problems:
        sys.exit(1)


def _evaluate(cfg: DictConfig, overrides: list[str]) -> list[str]:
    """Return what failed."""
    prepared = prepare_evaluation(cfg, evaluation_of_job(overrides))
    with fast_imports():
        from rl_training.job.evaluation.run_checkpoints import evaluate_run_checkpoints

    return evaluate_run_checkpoints(prepared)


@contextlib.contextmanager
def fast_imports() -> Iterator[None]:
    """Run slow imports, kept out of --help, with garbage collection off, which saves a fifth of their time.

    WANDB_MODE is unset meanwhile: otherwise transformers would print that W&B is offline, even where it is not used.
    """
    gc.disable()
    mode = os.environ.pop("WANDB_MODE", None)
    try:
        yield
    finally:
        if mode is not None:
            os.environ["WANDB_MODE"] = mode
        gc.enable()

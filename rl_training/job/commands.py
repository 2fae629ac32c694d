"""train, analyze and evaluate: the commands whose settings Hydra composes from conf/.

    @composed("train")
    def _train(cfg: DictConfig) -> None: ...

A folder that is given by `--config-dir` comes before the package's own: its files win, and may add to each group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from rl_training.job.command_line import importing, past_hydra
from rl_training.job.run_settings import gather_run_settings, name_each_job
from rl_training.job.shipped import CONF, conf_folders


class _UsersFirst(SearchPathPlugin):
    """Puts --config-dir before conf/: Hydra itself would look there last, so that only new files counted."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in conf_folders()[:-1]:
            search_path.prepend("user", f"file://{folder}", anchor="main")


Plugins.instance().register(_UsersFirst)


def composed(name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Returns a decorator that makes a command of a task: its settings are conf/NAME.yaml with those of sys.argv."""
    of_hydra = hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)
    return lambda task: of_hydra(past_hydra(task))


def train() -> None:
    """Trains with GRPO and probes, and writes the report."""
    # Any field of DrGRPOConfig can be set, listed in conf/trainer or not: Hydra would ask for a + before the unlisted.
    # A mistyped name is refused in build_run.
    sys.argv[1:] = [f"++{arg}" if arg.startswith("trainer.") else arg for arg in sys.argv[1:]]
    _train()


@composed("train")
def _train(cfg: DictConfig) -> None:
    from rl_training.job.settings import check_run

    check_run(cfg)  # checked again in build_run; here before slow imports
    with importing():
        from rl_training.job.branch import branched
        from rl_training.job.build import build_run

    run = build_run(branched(cfg))
    run.train()
    run.report()
    run.end()


def analyze() -> None:
    """Analyzes checkpoints: what the next step of each does to entropy, predicted and measured."""
    sys.argv[1:] = name_each_job(gather_run_settings(sys.argv[1:]))
    _analyze()


@composed("offline")
def _analyze(cfg: DictConfig) -> None:
    from rl_training.job.settings import check_analysis

    check_analysis(cfg)  # again by its plan; here it waits for no import
    with importing():
        from rl_training.job.analysis import analyse_checkpoints

    analyse_checkpoints(cfg)


def evaluate() -> None:
    """Evaluates the checkpoints of a run."""
    # Settings of the run's own configuration, and names of metrics, which conf/evaluate.yaml cannot list.
    laid_over = ("data.", "model.", "adapter.", "metrics.")
    sys.argv[1:] = [f"++{arg}" if arg.startswith(laid_over) else arg for arg in sys.argv[1:]]
    _evaluate()


@composed("evaluate")
def _evaluate(cfg: DictConfig) -> None:
    from rl_training.job.settings import check_evaluation

    check_evaluation(cfg)  # again by its plan; here it waits for no import
    with importing():
        from rl_training.job.evaluate import evaluate

    sys.exit(evaluate(cfg))

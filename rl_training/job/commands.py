"""train, analyze and evaluate: the commands whose settings Hydra composes from conf/.

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

from rl_training.job.command_line import Carried, importing
from rl_training.job.run_settings import branched, gather_run_settings, name_each_job
from rl_training.job.settings import check_analysis, check_evaluation, check_run
from rl_training.job.shipped import CONF, conf_folders


class _UsersFirst(SearchPathPlugin):
    """Puts --config-dir before conf/: Hydra itself would look there last, so that only new files counted."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in conf_folders()[:-1]:
            search_path.prepend("user", f"file://{folder}", anchor="main")


Plugins.instance().register(_UsersFirst)


def _composed(name: str, task: Callable[[DictConfig], None], unlisted: tuple[str, ...] = ()) -> None:
    """Runs a task with the settings of conf/NAME.yaml and those of sys.argv.

    unlisted  what settings start with that can be set without being listed in conf/: Hydra would ask for a + before
              them
    """

    def carrying(cfg: DictConfig) -> None:
        try:
            task(cfg)
        except Exception as error:
            raise Carried(error) from error

    sys.argv[1:] = [f"++{word}" if unlisted and word.startswith(unlisted) else word for word in sys.argv[1:]]
    hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(carrying)()


def train() -> None:
    """Trains with GRPO and probes, and writes the report."""
    _composed("train", _train, unlisted=("trainer.",))  # any field of DrGRPOConfig; build_run refuses a mistyped one


def _train(cfg: DictConfig) -> None:
    check_run(cfg)  # checked again in build_run; here before slow imports
    with importing():
        from rl_training.job.build import build_run

    run = build_run(branched(cfg))
    run.train()
    run.report()
    run.end()


def analyze() -> None:
    """Analyzes checkpoints: what the next step of each does to entropy, predicted and measured."""
    sys.argv[1:] = name_each_job(gather_run_settings(sys.argv[1:]))
    _composed("offline", _analyze)


def _analyze(cfg: DictConfig) -> None:
    check_analysis(cfg)  # again by its plan; here it waits for no import
    with importing():
        from rl_training.job.analysis import analyse_checkpoints

    analyse_checkpoints(cfg)


def evaluate() -> None:
    """Evaluates the checkpoints of a run."""
    # Settings of the run's own configuration, and names of metrics, which conf/evaluate.yaml cannot list.
    _composed("evaluate", _evaluate, unlisted=("data.", "model.", "adapter.", "metrics."))


def _evaluate(cfg: DictConfig) -> None:
    check_evaluation(cfg)  # again by its plan; here it waits for no import
    with importing():
        from rl_training.job.evaluate import evaluate

    sys.exit(evaluate(cfg))

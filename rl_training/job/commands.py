"""train, analyze and evaluate: the commands whose settings Hydra composes from conf/.

A folder that is given by `--config-dir` comes before the package's own: its files win, and may add to each group.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_training.errors import UserError
from rl_training.job.command_line import importing
from rl_training.job.explain import explain, load_plain
from rl_training.job.own_code import find_own_code
from rl_training.job.run_settings import branched, key_of, parsed, settable, with_all_loggers, words_of_the_run
from rl_training.job.settings import check_analysis, check_evaluation, check_run
from rl_training.job.shipped import CONF, conf_folders
from rl_training.records.masking import mask_line, mask_words, secrets_in, without_secrets


class _UsersFirst(SearchPathPlugin):
    """Puts --config-dir before conf/: Hydra itself would look there last, so that only new files counted."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in conf_folders()[:-1]:
            search_path.prepend("user", f"file://{folder}", anchor="main")


Plugins.instance().register(_UsersFirst)


def _composed(name: str, task: Callable[[DictConfig, list[str]], None], is_listed: Callable[[str], bool]) -> None:
    """Runs a task with the settings of conf/NAME.yaml and those of sys.argv, and with the words of these.

    is_listed  whether conf/ lists what a word sets; Hydra would ask for a + before the others
    """

    failures: list[Exception] = []  # of the task; Hydra would print a line of its own about each in every process

    def job(cfg: DictConfig) -> None:
        try:
            if not failures:
                words = list(HydraConfig.get().overrides.task)
                _hide_secrets()
                find_own_code(cfg)
                task(cfg, words)
        except (HydraException, OmegaConfBaseException) as error:
            failures.append(UserError(explain(error)).with_traceback(error.__traceback__))
        except Exception as error:
            failures.append(error)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on, instead of printing them
    sys.argv[1:] = [word if is_listed(word) else settable(word) for word in sys.argv[1:]]
    try:
        with _settings_shown_masked():
            hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(job)()
    except Exception as error:
        raise UserError(explain(error)) from error
    if failures:
        raise failures[0]


def _hide_secrets() -> None:
    """Mask secrets in what Hydra and W&B keep of a command line: in Hydra's note of a sweep, and in sys.argv."""
    hydra = HydraConfig.get()
    note = Path(hydra.sweep.dir) / "multirun.yaml"
    if hydra.mode == RunMode.MULTIRUN and note.is_file():
        noted = without_secrets(OmegaConf.to_container(OmegaConf.load(note)))
        note.write_text(OmegaConf.to_yaml(OmegaConf.create(noted)), encoding="utf-8")
    sys.argv[1:] = mask_words(sys.argv[1:])


@contextlib.contextmanager
def _settings_shown_masked() -> Iterator[None]:
    """A context in which the settings that Hydra prints for --cfg or --info are printed without secrets."""
    if not {word.partition("=")[0] for word in sys.argv[1:]} & {"--cfg", "-c", "--info", "-i"}:
        yield
        return
    known, shown = secrets_in(sys.argv[1:], os.environ), io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            yield
    finally:
        print(mask_line(shown.getvalue(), known), end="")


def train() -> None:
    """Trains with GRPO and probes, and writes the report."""
    of_a_branch = any(word.startswith("branch=") for word in sys.argv[1:])  # it has the settings of its run
    _composed("train", _train, lambda word: not of_a_branch and key_of(word) != "trainer")


def _train(cfg: DictConfig, words: list[str]) -> None:
    cfg = with_all_loggers(branched(cfg, words), words)
    check_run(cfg)  # checked again in build_run; here before slow imports
    with importing():
        from rl_training.job.build import build_run

    run = build_run(cfg)
    run.train()
    run.report()
    run.end()


def analyze() -> None:
    """Analyzes checkpoints: what the next step of each does to entropy, predicted and measured."""
    _composed("offline", _analyze, lambda word: not words_of_the_run([word]))


def _analyze(cfg: DictConfig, words: list[str]) -> None:
    of_the_run = words_of_the_run(words)
    cfg = OmegaConf.masked_copy(cfg, list(load_plain(CONF / "offline.yaml").keys() & cfg.keys()))
    cfg.run = [*cfg.run, *of_the_run]
    if HydraConfig.get().mode == RunMode.MULTIRUN and "name" not in map(key_of, words):
        typed = [word for word in sys.argv[1:] if key_of(word)]
        swept = {word.key_or_group for word in parsed(typed) if word.is_sweep_override()} - {"checkpoint"}
        apart = [word.lstrip("+") for word in words if word.lstrip("+").partition("=")[0] in swept]
        cfg.name = ",".join([cfg.name, *mask_words(apart)])  # else all jobs would write into one folder
    check_analysis(cfg)  # again by its plan; here it waits for no import
    with importing():
        from rl_training.job.analysis import analyse_checkpoints

    analyse_checkpoints(cfg)


def evaluate() -> None:
    """Evaluates the checkpoints of a run."""
    # Settings of the run's own configuration, and names of metrics, which conf/evaluate.yaml cannot list.
    _composed("evaluate", _evaluate, lambda word: key_of(word) not in ("data", "model", "adapter", "metrics"))


def _evaluate(cfg: DictConfig, words: list[str]) -> None:
    check_evaluation(cfg)  # again by its plan; here it waits for no import
    with importing():
        from rl_training.job.evaluate import evaluate

    sys.exit(evaluate(cfg))

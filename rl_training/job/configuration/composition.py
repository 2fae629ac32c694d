"""Composes the settings of a command with Hydra, from conf/ and the command line.

A folder given by `--config-dir` takes precedence over the package's conf/: its files win, and can add options to each
group.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_training.errors import UserError
from rl_training.job.configuration.custom_code import add_custom_code_to_path
from rl_training.job.configuration.hydra_errors import explain
from rl_training.job.configuration.overrides import force_add
from rl_training.job.configuration.shipped import CONF, conf_folders
from rl_training.records.files.masking import mask_arguments, mask_line, secrets_in, without_secrets
from rl_training.records.hydra_text import quote_value


class _UserFolderFirst(SearchPathPlugin):
    """Searches --config-dir before conf/. Hydra would search it last, so that it could only add new files."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in conf_folders()[:-1]:
            search_path.prepend("user", f"file://{folder}", anchor="main")


Plugins.instance().register(_UserFolderFirst)


def run_composed(name: str, task: Callable[[DictConfig, list[str]], None], is_listed: Callable[[str], bool]) -> None:
    """Compose conf/NAME.yaml with the overrides in sys.argv, and run a task with the result.

    Args:
        name: File in conf/, without `.yaml`.
        task: Called with the composed settings and the list of overrides. In a sweep it is called once per job, until
            a job fails.
        is_listed: Returns whether conf/ lists the setting that this argument sets. Hydra would require a + before all
            other settings.
    """
    failures: list[Exception] = []  # raised by the task; Hydra would print its own line about each in every process

    def job(cfg: DictConfig) -> None:
        try:
            if not failures:
                overrides = list(HydraConfig.get().overrides.task)
                sys.argv[1:] = typed
                _hide_secrets()
                add_custom_code_to_path(cfg)
                task(cfg, overrides)
        except (HydraException, OmegaConfBaseException) as error:
            failures.append(UserError(explain(error, name)).with_traceback(error.__traceback__))
        except Exception as error:
            failures.append(error)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors instead of printing them
    _refuse_unknown_flags()
    typed = [word if is_listed(word) else force_add(word) for word in sys.argv[1:]]
    sys.argv[1:] = typed
    try:
        with _settings_shown_masked(), _sweep_recorded_elsewhere():
            hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(job)()
    except Exception as error:
        if line := explain(error, name):
            raise UserError(line) from error
        raise
    if failures:
        raise failures[0]


def _refuse_unknown_flags() -> None:
    """Raise UserError for a flag that Hydra would answer with a page of usage."""

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message}: settings are KEY=VALUE, without dashes; --hydra-help lists the flags")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()


def _hide_secrets() -> None:
    """Mask secrets where Hydra and W&B record the command line: in Hydra's multirun.yaml, and in sys.argv."""
    hydra = HydraConfig.get()
    multirun_file = Path(hydra.sweep.dir) / "multirun.yaml"
    if hydra.mode == RunMode.MULTIRUN and multirun_file.is_file():
        masked = without_secrets(OmegaConf.to_container(OmegaConf.load(multirun_file)))
        multirun_file.write_text(OmegaConf.to_yaml(OmegaConf.create(masked)), encoding="utf-8")
    sys.argv[1:] = mask_arguments(sys.argv[1:])


@contextlib.contextmanager
def _sweep_recorded_elsewhere() -> Iterator[None]:
    """Have Hydra write its record of a sweep to a temporary folder, unless one was typed.

    It would leave a folder `multirun` where the command was typed. The folder of each job has its settings and command.
    """
    typed = sys.argv[1:]
    if not {"-m", "--multirun"} & {*typed} or any(word.startswith("hydra.sweep.dir=") for word in typed):
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.argv.append(f"hydra.sweep.dir={quote_value(folder)}")
        yield


@contextlib.contextmanager
def _settings_shown_masked() -> Iterator[None]:
    """Mask secrets in the settings that Hydra prints for --cfg or --info."""
    if not {word.partition("=")[0] for word in sys.argv[1:]} & {"--cfg", "-c", "--info", "-i"}:
        yield
        return
    secrets = secrets_in(sys.argv[1:], os.environ)
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            yield
    finally:
        print(mask_line(shown.getvalue(), secrets), end="")

"""Composes the settings of a command by Hydra, from conf/ and from what was typed.

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
from rl_training.job.configuration.custom_code import add_custom_code_to_path
from rl_training.job.configuration.hydra_errors import explain
from rl_training.job.configuration.overrides import settable
from rl_training.job.configuration.shipped import CONF, conf_folders
from rl_training.records.files.masking import mask_line, mask_words, secrets_in, without_secrets


class _UsersFirst(SearchPathPlugin):
    """Puts --config-dir before conf/: Hydra itself would look there last, so that only new files counted."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in conf_folders()[:-1]:
            search_path.prepend("user", f"file://{folder}", anchor="main")


Plugins.instance().register(_UsersFirst)


def run_composed(name: str, task: Callable[[DictConfig, list[str]], None], is_listed: Callable[[str], bool]) -> None:
    """Run a task with the settings of conf/NAME.yaml and those of sys.argv, and with the overrides that were typed.

    Args:
        is_listed: whether conf/ lists what a word sets; Hydra would ask for a + before the others
    """

    failures: list[Exception] = []  # of the task; Hydra would print a line of its own about each in every process

    def job(cfg: DictConfig) -> None:
        try:
            if not failures:
                overrides = list(HydraConfig.get().overrides.task)
                _hide_secrets()
                add_custom_code_to_path(cfg)
                task(cfg, overrides)
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
        if line := explain(error):
            raise UserError(line) from error
        raise
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
    """Mask the secrets in the settings that Hydra prints for --cfg or --info."""
    if not {word.partition("=")[0] for word in sys.argv[1:]} & {"--cfg", "-c", "--info", "-i"}:
        yield
        return
    known, shown = secrets_in(sys.argv[1:], os.environ), io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            yield
    finally:
        print(mask_line(shown.getvalue(), known), end="")

"""The dashboards of a list of loggers, 'logger=[wandb,tensorboard]', of which Hydra keeps those of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from rl_training.job.configuration.overrides import parse_overrides


def add_all_loggers(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Set `trainer.report_to`, in place, to the dashboards of all options in 'logger=[…]', if that was typed.

    Args:
        cfg: The composed settings.
        overrides: The overrides as typed. One of `trainer.report_to` itself takes precedence.
    """
    typed = {change.key_or_group: cast("Any", change.value()) for change in parse_overrides(overrides)}
    names = typed.get("logger")
    if isinstance(names, list) and "trainer.report_to" not in typed:
        options = [compose(f"logger/{name}") for name in names]
        chosen = [library for option in options for library in option.trainer.report_to]
        OmegaConf.update(cfg, "trainer.report_to", [*dict.fromkeys(chosen)], merge=False)

"""Checks of offline.py's configuration that need no slow import: what is set, its kinds, and the name."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl_training.job.explain import load_plain
from rl_training.job.settings import refuse_other_kinds, refuse_unset
from rl_training.job.shipped import CONF
from rl_training.offline.settings import (
    Evaluation,
    FirstOrderSettings,
    Memory,
    Settings,
    TruthSettings,
    UpdateConfig,
)

UNFIT = re.compile(r"[^\w.,=+-]+")  # for the name of a folder


def check_analysis(cfg: DictConfig) -> Settings:
    """Returns what is asked of a checkpoint. Raises ValueError for values that are not set, or mean nothing."""
    refuse_unset(cfg)
    values: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    refuse_other_kinds(values, load_plain(CONF / "offline.yaml"))
    name_of(str(values["name"]))
    return Settings(
        evaluation=Evaluation(**values["evaluation"]),
        update=UpdateConfig(**values["update"]),
        first_order=FirstOrderSettings(**values["first_order"]),
        truth=TruthSettings(**values["truth"]),
        conditioning=values["conditioning"],
        memory=Memory(**values["memory"]),
    )


def name_of(name: str) -> str:
    """Returns the folder for an analysis of this name. Raises ValueError for a name that is none of a folder.

    What follows a comma names a job of a sweep by its settings, and is made fit.
    """
    typed = name.partition(",")[0]
    if UNFIT.search(typed) or typed.startswith(".") or not typed:
        raise ValueError(f"name={typed} names a folder in RUN/offline: use only letters, digits and . = + - _")
    return UNFIT.sub("", name)

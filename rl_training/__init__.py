"""Probes for reinforcement learning of language models: they run inside the training loop of TRL's GRPO trainer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_training.job.offline_probe import OfflineEntropyProbe
    from rl_training.live.attach import attach
    from rl_training.live.trainer import DrGRPOConfig, DrGRPOTrainer
    from rl_training.mathematics.estimate import Estimate
    from rl_training.probes.base import Probe

__all__ = ["DrGRPOConfig", "DrGRPOTrainer", "Estimate", "OfflineEntropyProbe", "Probe", "attach"]

_HOME = {
    "DrGRPOConfig": "live.trainer",
    "DrGRPOTrainer": "live.trainer",
    "Estimate": "mathematics.estimate",
    "OfflineEntropyProbe": "job.offline_probe",
    "Probe": "probes.base",
    "attach": "live.attach",
}


def __getattr__(name: str) -> Any:
    """Returns a public name, imported when it is first asked for: who reads records needs neither torch nor TRL."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

"""Probes for reinforcement learning of language models: they run inside the training loop of TRL's GRPO trainer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_training.engine.probe import Probe
    from rl_training.hosts.trl.attach import attach
    from rl_training.hosts.trl.trainer import DrGRPOConfig, DrGRPOTrainer
    from rl_training.job.offline_probe import OfflineEntropyProbe
    from rl_training.mathematics.estimate import Estimate

__all__ = ["DrGRPOConfig", "DrGRPOTrainer", "Estimate", "OfflineEntropyProbe", "Probe", "attach"]

_HOME = {
    "DrGRPOConfig": "hosts.trl.trainer",
    "DrGRPOTrainer": "hosts.trl.trainer",
    "Estimate": "mathematics.estimate",
    "OfflineEntropyProbe": "job.offline_probe",
    "Probe": "engine.probe",
    "attach": "hosts.trl.attach",
}


def __getattr__(name: str) -> Any:
    """Returns a public name, imported when it is first asked for: who reads records needs neither torch nor TRL."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

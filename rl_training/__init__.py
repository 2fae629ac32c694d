"""Probes for reinforcement learning of language models: in TRL's GRPO trainer, or in a loop in plain PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_training.extras import of_an_extra

if TYPE_CHECKING:
    from rl_training.engine.batch import Rollout as Rollout
    from rl_training.engine.probe import Probe as Probe
    from rl_training.hosts.loop import measured_loop as measured_loop
    from rl_training.hosts.trl import attach as attach
    from rl_training.hosts.trl.trainer import DrGRPOConfig as DrGRPOConfig
    from rl_training.hosts.trl.trainer import DrGRPOTrainer as DrGRPOTrainer
    from rl_training.job.offline_probe import OfflineEntropyProbe as OfflineEntropyProbe
    from rl_training.mathematics.estimate import Estimate as Estimate

_HOME = {
    "DrGRPOConfig": "hosts.trl.trainer",
    "DrGRPOTrainer": "hosts.trl.trainer",
    "Estimate": "mathematics.estimate",
    "OfflineEntropyProbe": "job.offline_probe",
    "Probe": "engine.probe",
    "Rollout": "engine.batch",
    "attach": "hosts.trl",
    "measured_loop": "hosts.loop",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Returns a public name, imported on first use: reading records needs neither torch nor TRL."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with of_an_extra():
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

"""Probes for reinforcement learning of language models: in TRL's GRPO trainer, in verl, or in a loop in plain PyTorch.

CONTRIBUTING.md has a tree of the packages. Beside them:

errors.py                    errors that say what to change, also if a library is missing or hidden by a user's file
options.py                   settings as arguments, with the closest name
vocabulary.py                words and numbers on which the engine and the records agree
attach.py, verl_plugin.py    entries of `python -m rl_training.attach` and of verl; version.py has the version
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_training.errors import require_extra

if TYPE_CHECKING:
    from rl_training.engine.probe import Probe as Probe
    from rl_training.engine.probe import Reading as Reading
    from rl_training.errors import UserError as UserError
    from rl_training.hosts.plain.measured_loop import measured_loop as measured_loop
    from rl_training.hosts.trl import attach as attach
    from rl_training.hosts.trl.config import DrGRPOConfig as DrGRPOConfig
    from rl_training.hosts.trl.trainer import DrGRPOTrainer as DrGRPOTrainer
    from rl_training.job.api.offline_probe import OfflineEntropyProbe as OfflineEntropyProbe
    from rl_training.job.api.own_evaluation import evaluate as evaluate
    from rl_training.offline.own_trainer import analyze as analyze
    from rl_training.policy.rollout import Rollout as Rollout
    from rl_training.policy.rollout import take_rows as take_rows
    from rl_training.probes import *  # noqa: F403
    from rl_training.records.report import print_summary as print_summary
    from rl_training.records.report import write_report as write_report
    from rl_training.records.writer import Records as Records
    from rl_training.statistics.estimate import Estimate as Estimate

_NAMES = {  # by module that defines them; a name …Probe is looked up in `probes`
    "policy.rollout": "Rollout take_rows",
    "engine.probe": "Probe Reading",
    "errors": "UserError",
    "hosts.plain.measured_loop": "measured_loop",
    "hosts.trl": "attach",
    "hosts.trl.config": "DrGRPOConfig",
    "hosts.trl.trainer": "DrGRPOTrainer",
    "offline.own_trainer": "analyze",
    "job.api.own_evaluation": "evaluate",
    "job.api.offline_probe": "OfflineEntropyProbe",
    "statistics.estimate": "Estimate",
    "records.writer": "Records",
    "records.report": "print_summary write_report",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Return a public name, imported on first use, so that reading records requires neither torch nor TRL."""
    if name == "__all__":
        with require_extra():
            built_in = importlib.import_module(f"{__name__}.probes").BUILT_IN
        return [*_HOME, *(probe.__name__ for probe in built_in.values())]
    home = _HOME.get(name, "probes" if name.endswith("Probe") else None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with require_extra():
        module = importlib.import_module(f"{__name__}.{home}")
    if not hasattr(module, name):  # ends with Probe, and is none of the built-in ones
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)

"""The settings of a TRL trainer, for the config.yaml and the records of its run."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from tokenize import TokenError
from typing import Any

from torch import dtype, nn
from trl import GRPOTrainer

from rl_training.engine.probe import Probe
from rl_training.hosts.recorded_settings import settings_of_model, settings_of_optimizer
from rl_training.hosts.trl.settings.rollout_shape import sequences_per_step
from rl_training.parallel.ranks import all_ranks
from rl_training.parallel.sharding import dtype_name
from rl_training.records.made_by import MADE_BY, TRL
from rl_training.records.training_settings import REPORTING_FIELDS


def settings_of_trainer(trainer: GRPOTrainer, attached: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect a trainer's training, named as in the commands' config.yaml where it has them.

    Args:
        trainer: The trainer.
        attached: Settings of the attachment that affect training.
    """
    args = trainer.args
    processes = all_ranks().count
    rows = trainer.train_dataset
    names = (field.name for field in dataclasses.fields(args))
    fields = {name: getattr(args, name) for name in names if not name.startswith(REPORTING_FIELDS)}
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # without accelerate's wrapper
    return {
        MADE_BY: TRL,
        "seed": args.seed,
        "batch": {"sequences_per_step": processes * sequences_per_step(args), "processes": processes},
        "trainer": {"class": type(trainer).__name__, **fields},
        "model": settings_of_model(trainer.model),
        "adapter": _adapter(trainer.model),
        "data": {
            "rows": len(rows) if hasattr(rows, "__len__") else None,
            "columns": list(getattr(rows, "column_names", None) or []),
            "rewards": list(trainer.reward_func_names),
            "rewards_source": [_digest_of_source(function) for function in trainer.reward_funcs],
        },
        "optimizer": settings_of_optimizer(optimizer),
        "attached": dict(attached),
    }


def settings_of_probes(probes: Sequence[Probe]) -> dict[str, Any]:
    """Return the plain options of each probe, by its name: those stored in an attribute named like the argument."""
    return {probe.name: {"class": type(probe).__name__, **_options_of(probe)} for probe in probes}


def _options_of(probe: Probe) -> dict[str, Any]:
    stored = {option: getattr(probe, option, ...) for option in inspect.signature(type(probe).__init__).parameters}
    named = {option: dtype_name(value) if isinstance(value, dtype) else value for option, value in stored.items()}
    return {option: value for option, value in named.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    """Return whether an option is a text, a number or None, or a list of these: others only show their address."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float | None)


def _digest_of_source(function: object) -> str:
    """Return a digest of a function's source, to tell functions of the same name apart. Empty if there is no source."""
    try:
        source = inspect.getsource(function)  # type: ignore[arg-type]
    except (TypeError, OSError):  # a model, a partial, or a function typed into an interpreter
        return ""
    except (SyntaxError, TokenError):  # its file has been edited since it was imported
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def _adapter(model: nn.Module) -> dict[str, Any]:
    """Return the settings of the trained adapter. Empty without one."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping) or not adapters:
        return {}
    active = getattr(model, "active_adapter", None)
    chosen: Any = adapters.get(active) if isinstance(active, str) else next(iter(adapters.values()))
    settings = chosen.to_dict() if hasattr(chosen, "to_dict") else {}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}

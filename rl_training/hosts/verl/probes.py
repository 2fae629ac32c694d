"""The probes that a configuration of verl chooses, made in the command to refuse them and in each worker to measure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from rl_training.engine.probe import Probe
from rl_training.errors import UserError

NUM_STEPS = "verl"  # key of the number of optimizer steps in a checkpoint, beside the probes' states under their names


def make_probes(settings: Mapping[str, Any]) -> list[Probe]:
    """Make the probes of a configuration.

    Args:
        settings: `config.probes`: for each probe a `_target_` with its options.

    Raises:
        UserError: A probe cannot be made, or has the name of this package's own entry in a checkpoint.
    """
    probes = [_make(name, options) for name, options in settings.items()]
    if any(probe.name == NUM_STEPS for probe in probes):
        raise UserError(f"the name {NUM_STEPS} is reserved: give the probe another one")
    return probes


def _make(name: str, options: Any) -> Probe:
    try:
        return instantiate(options, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ if isinstance(error.__cause__, UserError) else error
        raise UserError(f"probes.{name}: {' '.join(str(cause).split())}") from error

"""The probes of a loop, as its user gives them: by name, or as objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rl_training.engine.probe import Probe
from rl_training.errors import UserError
from rl_training.options import check_num_folds, did_you_mean
from rl_training.probes import BUILT_IN


def as_probes(given: Any) -> tuple[Probe, ...]:
    """Return the given probes as a tuple: one or several, as objects, or as names for their default options.

    Raises:
        UserError: For an object or a name that is no probe, and for an impossible number of folds.
    """
    if isinstance(given, Mapping):
        raise UserError(
            f"probes={given!r} is a dictionary: give a list of names and objects; an object has the options, as in "
            "SimpleEntropyProbe(every=5)"
        )
    probes = (given,) if isinstance(given, Probe | type | str) or not isinstance(given, Iterable) else tuple(given)
    return tuple(map(_as_probe, probes))


def _as_probe(given: Any) -> Probe:
    if isinstance(given, str):
        if given not in BUILT_IN:
            raise UserError(f"{given!r} names no probe: there are {', '.join(BUILT_IN)}{_meant(given)}")
        return BUILT_IN[given]()
    if not isinstance(given, Probe):
        raise UserError(
            f"{given!r} is no probe: give the name of one, such as 'simple', or an object of rl_training.Probe, such "
            "as SimpleEntropyProbe()"
        )
    check_num_folds(given.name, given.num_folds)
    return given


def _meant(name: str) -> str:
    """Return a hint at what a name that is no probe's was meant to be."""
    names = [part.strip() for part in name.split(",")]
    if len(names) > 1 and set(names) <= BUILT_IN.keys():
        return f"; several are a list, {names}"
    return did_you_mean(name, BUILT_IN.keys())

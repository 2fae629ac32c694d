"""The commands that train a branch without an intervention, one with PSR, and one per recommended intervention.

PSR (positive advantages only) comes first: docs/explanation/how_often_right.md has the test of this choice.
"""

from __future__ import annotations

import math

from rl_training.records.report.wording import wording_of
from rl_training.records.report.wording.base import MAX_PROPOSALS
from rl_training.records.table.effects import Effect, effects_of
from rl_training.records.table.rates import is_falling
from rl_training.records.table.series import Run


def branch_commands(run: Run) -> list[str]:
    """Return the commands that train a branch without an intervention and with each one, and compare them.

    There are none if nothing is recommended, or if there is no checkpoint to branch from. For an attached trainer
    they are lines of Python.
    """
    preferred = preferred_interventions(run)
    return wording_of(run).branches(run, preferred) if preferred else []


def preferred_interventions(run: Run) -> list[tuple[str, Effect]]:
    """Return values of `intervention` that halve the fall or keep entropy, the cheapest MAX_PROPOSALS, with effects.

    There are none if entropy does not fall.
    """
    if not is_falling(run):
        return []
    effects = dict[str, Effect]()
    set_up = wording_of(run).set_up
    for effect in effects_of(run):
        if math.isfinite(effect.halves_at.value) or effect.delta_h.bounds()[0] > 0:
            effects.setdefault(set_up.name_as_configured(effect), effect)
    return [*effects.items()][:MAX_PROPOSALS]

"""How good a prediction or a forecast is. Every score is a ratio of sums over runs; its interval draws the runs anew.

The runs are the independent units: steps of one run are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.mathematics.forecast import NORMAL_975

DRAWS = 2000
Score = tuple[float, float, float]  # a value with the ends of its 95 % interval
Term = tuple[float, float]  # what a run adds to numerator and denominator


def over_runs(terms: Sequence[Term]) -> Score:
    """Returns Σ numerators / Σ denominators, and the ends of its 95 % interval by bootstrap over runs."""
    table = torch.tensor(terms, dtype=torch.float64)
    draws = torch.randint(len(table), (DRAWS, len(table)), generator=torch.Generator().manual_seed(0))
    above, below = table[draws].sum(dim=1).unbind(-1)
    low, high = torch.nanquantile(above / below, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    value = table.sum(dim=0)
    return float(value[0] / value[1]), low, high


# --- single steps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """Predictions and truths of the same steps of one run, nats per token."""

    said: Tensor  # (n,)
    said_width: Tensor  # (n,) half the 95 % interval; nan where there is none
    truth: Tensor  # (n,)
    truth_width: Tensor  # (n,)


def slope(run: Pairs) -> Term:
    """Returns w Σ p t and w Σ p², of truth t on prediction p through 0; w = 1 / Σ t², so that all runs count alike.

    1: the predictions have the right size. Below, they are too large, or noisy.
    """
    size = run.truth.square().sum()
    return float((run.said * run.truth).sum() / size), float(run.said.square().sum() / size)


def correlation(run: Pairs) -> Term:
    """Returns Pearson's correlation along the run, and 1: how runs differ in size does not help."""
    return float(torch.corrcoef(torch.stack([run.said, run.truth]))[0, 1]), 1.0


def sign(run: Pairs) -> Term:
    """Returns the steps with the sign of the truth, and all: of those whose truth is certain to have one."""
    known = run.truth.abs() > run.truth_width
    return float((run.said.sign() == run.truth.sign())[known].sum()), float(known.sum())


def coverage(run: Pairs) -> Term:
    """Returns the steps whose truth is in the 95 % interval, widened by the truth's own, and those that have one."""
    inside = (run.said - run.truth).abs() <= torch.hypot(run.said_width, run.truth_width)
    has_interval = run.said_width.isfinite()
    return float(inside[has_interval].sum()), float(has_interval.sum())


# --- forecasts --------------------------------------------------------------------------------------------------------


def rms(errors: Tensor) -> float:
    """Returns the root mean square over the steps of a run; nan without any."""
    return float(errors.square().mean().sqrt())


def held(errors: Tensor, sds: Tensor, noise: Tensor) -> float:
    """Returns the share of errors within 1.96 standard deviations of forecast and measurement together."""
    return float((errors.abs() <= NORMAL_975 * torch.hypot(sds, noise)).double().mean())


def brier(chances: Tensor, came: Tensor) -> float:
    """Returns mean (chance − outcome)²: 0 is perfect, ¼ what a chance of one half earns."""
    return float((chances - came.double()).square().mean())


@dataclass(frozen=True)
class Alarms:
    """The alarms of one run that speak of what is to come."""

    right: int
    wrong: int
    crosses: bool  # the run goes below the level after the first step that is asked: that could have been foretold
    leads: tuple[int, ...]  # steps from each right alarm to the crossing


def alarms(chances: Sequence[float], below: Sequence[bool], first: int, ahead: int) -> Alarms:
    """Returns how a run's alarms came out: at a chance of one half or more, and then quiet for `ahead` steps.

    chances  at each step, to be below the level in `ahead` steps
    below    whether entropy is below it at each step; an alarm then is no warning, and is not counted
    first    the first step that is asked, from 0

    Wrong: not below within `ahead` steps. An alarm whose steps the run does not have is neither, unless it came true.
    """
    right, wrong, leads, quiet_until = 0, 0, [], first
    for step in range(first, len(chances)):
        if chances[step] < 0.5 or step < quiet_until or below[step]:
            continue
        quiet_until = step + ahead
        coming = [n for n in range(1, ahead + 1) if step + n < len(below) and below[step + n]]
        if coming:
            right += 1
            leads.append(coming[0])
        elif step + ahead < len(below):
            wrong += 1
    crosses = any(below[step] and not below[step - 1] for step in range(first + 1, len(below)))
    return Alarms(right, wrong, crosses, tuple(leads))

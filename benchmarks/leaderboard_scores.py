"""How good a prediction or a forecast is: scores of one run or of several, and their intervals by bootstrap over runs.

The runs are the independent units: steps of one run are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

DRAWS = 2000
Run = TypeVar("Run")


def bootstrap(runs: Sequence[Run], statistic: Callable[[Sequence[Run]], float]) -> tuple[float, float, float]:
    """Returns the statistic of all runs and the ends of its 95 % interval over runs drawn with replacement."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(runs), (DRAWS, len(runs)), generator=generator).tolist()
    values = torch.tensor([statistic([runs[i] for i in draw]) for draw in draws], dtype=torch.float64)
    low, high = torch.nanquantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return statistic(runs), low, high


# --- single steps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """Predictions and truths of the same steps of one run, nats per token."""

    said: Tensor  # (n,)
    said_width: Tensor  # (n,) half the 95 % interval; nan where there is none
    truth: Tensor  # (n,)
    truth_width: Tensor  # (n,)


def slope(runs: Sequence[Pairs]) -> float:
    """Returns Σ w p t / Σ w p², of truth t on prediction p through 0; w = 1 / Σ t² of the run, so that all count alike.

    1: the predictions have the right size. Below, they are too large.
    """
    weights = [1.0 / run.truth.square().sum() for run in runs]
    products = sum(float(w * (run.said * run.truth).sum()) for w, run in zip(weights, runs, strict=True))
    return products / sum(float(w * run.said.square().sum()) for w, run in zip(weights, runs, strict=True))


def correlation(runs: Sequence[Pairs]) -> float:
    """Returns the mean over runs of Pearson's correlation along each: how runs differ in size does not help."""
    return sum(float(torch.corrcoef(torch.stack([run.said, run.truth]))[0, 1]) for run in runs) / len(runs)


def sign(runs: Sequence[Pairs]) -> float:
    """Returns the share of steps with the sign of the truth, of those whose truth is certain to have one."""
    known = [run.truth.abs() > run.truth_width for run in runs]
    right = sum(int((run.said.sign() == run.truth.sign())[k].sum()) for run, k in zip(runs, known, strict=True))
    return right / number if (number := sum(int(k.sum()) for k in known)) else math.nan


def coverage(runs: Sequence[Pairs]) -> float:
    """Returns the share of truths within the 95 % interval of their prediction, widened by the truth's own."""
    held = torch.cat([(r.said - r.truth).abs() <= torch.hypot(r.said_width, r.truth_width) for r in runs])
    has_interval = torch.cat([r.said_width.isfinite() for r in runs])
    return float(held[has_interval].double().mean()) if has_interval.any() else math.nan


# --- forecasts --------------------------------------------------------------------------------------------------------


def rms(errors: Sequence[Tensor]) -> float:
    """Returns the mean over runs of the root mean square over the steps of each; runs without a step do not count."""
    each = [float(e.square().mean().sqrt()) for e in errors if len(e)]
    return sum(each) / len(each) if each else math.nan


def held(errors: Tensor, sds: Tensor, noise: Tensor) -> float:
    """Returns the share of errors within 1.96 standard deviations of forecast and measurement together."""
    return float((errors.abs() <= 1.959964 * torch.hypot(sds, noise)).double().mean())


def brier(chances: Tensor, came: Tensor) -> float:
    """Returns mean (chance − outcome)²: 0 is perfect, ¼ what a chance of one half earns."""
    return float((chances - came.double()).square().mean())


@dataclass(frozen=True)
class Alarms:
    """The alarms of one run that speak of what is to come, and the crossings that could have been foretold."""

    right: int
    wrong: int
    crossings: int  # events: a first step below the level, at or after the first step that is asked
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
    starts = [step for step in range(max(first, 1), len(below)) if below[step] and not below[step - 1]]
    return Alarms(right, wrong, min(len(starts), 1), tuple(leads))

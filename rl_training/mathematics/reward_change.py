"""The change of the mean reward between two policies, from responses that were sampled from the first. Pure functions.

A reward belongs to a whole response, and so does its weight, w = π'(t)/π(t), self-normalised:

    ΔR = Σ w r / Σ w − mean r           to first order, with s = ∂ log π(t)·δθ:   mean(r s) − mean(r) mean(s)

Errors are the delete-one-unit jackknife, as in per_decision.py.

Source: Owen 2013, "Monte Carlo theory, methods and examples", ch. 9.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_training.mathematics.jackknife import JackknifeUnits, Replicates


def reward_slope(rewards: Tensor, slopes_of_logps: Tensor, units: JackknifeUnits) -> Replicates:
    """Returns the slope of Σ w r / Σ w at w = 1, (1,), and without each unit: mean(r ∂S) − mean(r) mean(∂S).

    rewards, slopes_of_logps  (N,): r, and ∂S·δθ of each response

    >>> r, s = torch.tensor([0.0, 1.0, 2.0]).double(), torch.tensor([1.0, 0.0, 5.0]).double()
    >>> reward_slope(r, s, JackknifeUnits.of_rows(r)).value
    tensor([1.3333], dtype=torch.float64)
    """

    def slope(sums: Tensor) -> Tensor:
        count, of_rewards, of_slopes, of_both = sums.unbind(-1)
        return ((of_both - of_rewards * of_slopes / count) / count).unsqueeze(-1)

    columns = [torch.ones_like(rewards), rewards, slopes_of_logps, rewards * slopes_of_logps]
    return _of_sums(slope, torch.stack(columns, dim=1), units)


def reward_change(rewards: Tensor, log_ratios: Tensor, units: JackknifeUnits) -> Replicates:
    """Returns Σ w r / Σ w − Σ r / N, (1,), and without each unit.

    rewards, log_ratios  (N,): r, and log w of each response

    >>> r, w = torch.tensor([0.0, 1.0]).double(), torch.tensor([1.0, 3.0]).double()
    >>> reward_change(r, w.log(), JackknifeUnits.of_rows(r)).value
    tensor([0.2500], dtype=torch.float64)
    """
    weights = (log_ratios - log_ratios.max()).exp()

    def change(sums: Tensor) -> Tensor:
        count, of_rewards, of_weights, of_both = sums.unbind(-1)
        return (of_both / of_weights - of_rewards / count).unsqueeze(-1)

    return _of_sums(change, torch.stack([torch.ones_like(rewards), rewards, weights, weights * rewards], dim=1), units)


def mean_of(values: Tensor, units: JackknifeUnits) -> Replicates:
    """Returns the mean of (N,) values, (1,), and without each unit."""

    def mean(sums: Tensor) -> Tensor:
        return sums[..., 1:] / sums[..., :1]

    return _of_sums(mean, torch.stack([torch.ones_like(values), values], dim=1), units)


def _of_sums(statistic: Callable[[Tensor], Tensor], terms: Tensor, units: JackknifeUnits) -> Replicates:
    of_unit = units.gather(terms)
    total = of_unit.sum(dim=0)
    return Replicates(statistic(total), statistic(total - of_unit))

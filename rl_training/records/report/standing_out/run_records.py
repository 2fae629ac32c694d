"""The records of a run, as the rules of "What stands out" look at them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import pandas as pd

from rl_training.records.report.set_up import SetUp
from rl_training.records.report.story.broken_line import rise_of
from rl_training.records.report.story.reward_functions import spreads
from rl_training.records.report.wording import wording_of
from rl_training.records.report.wording.base import Wording
from rl_training.records.table.series import Run
from rl_training.records.table.trends import RECENT, share_of
from rl_training.statistics.estimate import Estimate

FEW_STEPS = 3  # logged steps from which something is said to last


@dataclass(frozen=True)
class RunRecords:
    """The records of a run, as the rules need them."""

    run: Run
    wording: Wording

    @classmethod
    def of(cls, run: Run) -> RunRecords:
        return cls(run, wording_of(run))

    @property
    def set_up(self) -> SetUp:
        return self.wording.set_up

    @functools.cached_property
    def reward(self) -> pd.Series[float]:
        return self.run.logged("reward")

    @functools.cached_property
    def reward_rise(self) -> Estimate:
        """By how much reward has risen over the run, whether in a line or early."""
        return rise_of(self.reward)

    @functools.cached_property
    def rates(self) -> pd.Series[float]:
        """The learning rate of every step. Between the logged ones it is that of the step before."""
        logged = self.run.logged("learning_rate")
        steps = range(self.run.steps[0], self.run.steps[-1] + 1)
        return logged.reindex(steps).ffill().bfill().dropna()

    @functools.cached_property
    def mixed(self) -> pd.Series[float]:
        """Share of prompts whose responses have unequal rewards, by step."""
        return 1 - self.run.logged("frac_reward_zero_std")

    @functools.cached_property
    def cut_off(self) -> pd.Series[float]:
        """Share of responses cut off at the maximum length, by step."""
        return self.run.logged("completions/clipped_ratio")

    @functools.cached_property
    def length(self) -> pd.Series[float]:
        return self.run.logged("completions/mean_length")

    @functools.cached_property
    def spread(self) -> pd.Series[float]:
        return spreads(self.run)

    @property
    def largest_spread(self) -> float:
        """The largest standard deviation of rewards in a step; 0 if none was logged."""
        return float(self.spread.max()) if len(self.spread) else 0.0

    def of_responses(self, shares: pd.Series[float]) -> Estimate:
        """Return the mean of these shares, with its interval as a share of all responses in these steps.

        If the number of responses per step is not recorded, each step counts as one.
        """
        return _share(shares, self.set_up.sequences)

    def of_prompts(self, shares: pd.Series[float]) -> Estimate:
        """Return the mean of these shares, with its interval as a share of all prompts in these steps."""
        return _share(shares, self.set_up.prompts)


def _share(shares: pd.Series[float], number: float) -> Estimate:
    part = number if math.isfinite(number) else 1.0
    return share_of(float(shares.sum()) * part, len(shares) * part)


def recent(values: pd.Series[float]) -> pd.Series[float]:
    """Return the values of the last ten logged steps."""
    return values.tail(RECENT)


def span_of(values: pd.Series[float]) -> tuple[int, int]:
    """Return the first and the last step of these values."""
    return int(values.index[0]), int(values.index[-1])


def in_percent(share: Estimate) -> str:
    """Return a share with its interval, in percent.

    >>> in_percent(share_of(0, 100))
    '0% (0% … 3.6%)'
    >>> in_percent(share_of(100, 100))
    '100% (96% … 100%)'
    """
    low, high = share.bounds()
    return f"{_percent(share.value)} ({_percent(low)} … {_percent(high)})"


def _percent(share: float) -> str:
    hundredths = 100 * share
    digits = 2 if hundredths < 10 else 3 if hundredths > 99 else 0
    return f"{hundredths:.{digits}g}%" if digits else f"{hundredths:.0f}%"

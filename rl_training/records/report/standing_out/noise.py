"""The noise of rewards, as the rules weigh it: of a step's mean, within prompts, and in step with another number.

Thresholds were chosen by hand, on the trainings of seed 0 of benchmarks/planted_faults.py.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy.special import betaln

from rl_training.records.report.standing_out.run_records import RunRecords, recent
from rl_training.records.report.story.noise import deviation_by_median
from rl_training.records.table.trends import MIN_STEPS
from rl_training.statistics.estimate import Z_95, Estimate

MIN_JUMP_STDERRS = 6.0  # standard errors of a jump or a break; high, because every step is tested
CORRELATION = 0.15  # of rewards within a prompt, which rewards by lot do not have
# Mean rewards at which lots can be told apart: nearer to 0 or 1, nearly all prompts have equal rewards anyway.
MIN_MEAN = 0.03
MAX_MEAN = 0.97
STDERRS = 2.0  # by which the number of prompts with equal rewards may differ from the expected one
MAX_CORRELATION = 1 - 1e-6  # Fisher's z is infinite at 1


def noise_of_a_step(records: RunRecords) -> float:
    """Return the standard error of a step's mean reward: by step-to-step changes or by spread, whichever is larger.

    Steps whose rewards are all the same are left out, unless all steps are such: they have no noise.
    """
    reward = records.reward
    spread = records.spread
    spread = spread[spread > 0]
    if len(spread):
        reward = reward[reward.index.isin(spread.index)]
    changes = reward.diff().dropna().to_numpy()
    deviation = deviation_by_median(changes) if len(changes) else 0.0
    scatter = deviation / math.sqrt(2)  # a change has the noise of two steps
    number = records.set_up.sequences
    of_spread = float(spread.median()) / math.sqrt(number) if number > 0 and len(spread) else 0.0
    return max(scatter, of_spread)


def fall_as_if_by_lot(records: RunRecords) -> bool:
    """Return whether rewards of 0 and 1 do not depend on the prompt: as few prompts have equal rewards as by lot.

    By lot, all n responses to a prompt earn the same with probability pⁿ + (1 − p)ⁿ. Rewards with the correlation
    CORRELATION within a prompt (beta-binomial) must be excluded. Prompts of equal difficulty cannot be told from lots.
    """
    p = recent(records.reward)
    count = records.set_up.responses
    p = p[(p > MIN_MEAN) & (p < MAX_MEAN)]
    if len(p) < MIN_STEPS or not count > 1 or not records.set_up.prompts > 0:
        return False
    equal = records.set_up.prompts * float((1 - records.mixed.reindex(p.index)).sum())
    by_lot = records.set_up.prompts * float((p**count + (1 - p) ** count).sum())
    a = p * (1 / CORRELATION - 1)
    b = (1 - p) * (1 / CORRELATION - 1)
    correlated = np.exp(betaln(a + count, b) - betaln(a, b)) + np.exp(betaln(a, b + count) - betaln(a, b))
    expected = records.set_up.prompts * float(correlated.sum())
    is_by_lot = equal <= by_lot + STDERRS * math.sqrt(by_lot)
    return is_by_lot and equal < expected - STDERRS * math.sqrt(expected)


def correlation(first: pd.Series[float], other: pd.Series[float]) -> Estimate:
    """Return the correlation with Fisher's interval; nan for too few values."""
    count = len(first)
    if count < MIN_STEPS or not (first.std() > 0 and other.std() > 0):
        return Estimate.missing("too few steps that differ")
    r = float(np.corrcoef(first, other)[0, 1])
    half = Z_95 / math.sqrt(count - 3)
    middle = math.atanh(min(max(r, -MAX_CORRELATION), MAX_CORRELATION))
    ends = (math.tanh(middle - half), math.tanh(middle + half))
    return Estimate(r, num_samples=count, reason="its interval is not symmetric", interval=ends)

"""A line or an exponential through the recent half, whichever leaves less, where it falls or rises significantly.

Theil and Sen's slope and median intercept; significant by Mann and Kendall's test at 5 %. Where it is not, entropy is
said to have stabilised: the value that the fit has now goes on.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import kendalltau, theilslopes

from forecasters import History
from rl_training.mathematics.forecast import Ahead

SOURCE = "rldoctor 0.2.0 (PyPI), project_threshold on the later half of the run, at least 8 steps"
FEWEST = 8


def forecast(history: History, horizons: Sequence[int]) -> list[Ahead]:
    entropy = history.entropy.double().numpy()
    recent = entropy[-max(len(entropy) // 2, FEWEST) :]
    steps = np.arange(len(recent), dtype=float)
    fits = [theilslopes(values, steps)[:2] for values in (recent, np.log(recent))]
    lines = [slope * steps + intercept for slope, intercept in fits]
    exponential = _spread(recent - np.exp(lines[1])) < _spread(recent - lines[0])
    slope, intercept = fits[exponential]
    falls_or_rises = kendalltau(steps, recent).pvalue < 0.05
    said = []
    for ahead in horizons:
        value = intercept + slope * (steps[-1] + (ahead if falls_or_rises else 0))
        # A line that reaches 0 has no logarithm: a tenth of the present entropy is as low as it may go.
        said.append(Ahead(value if exponential else math.log(max(value, recent[-1] / 10)), math.nan))
    return said


def _spread(residuals: np.ndarray) -> float:
    return float(np.median(np.abs(residuals - np.median(residuals))))

"""delta_h/forward alone goes on: the mean of δH/H over the last ten steps, each step ahead."""

import math
from collections.abc import Sequence

from forecasters import History
from rl_training.mathematics.forecast import Ahead

SOURCE = "first order, extrapolated undamped"


def forecast(history: History, horizons: Sequence[int]) -> list[Ahead]:
    rate = float((history.forward / history.entropy)[-10:].nanmean())
    level = math.log(float(history.entropy[-3:].mean()))
    return [Ahead(level + steps * rate, math.nan) for steps in horizons]

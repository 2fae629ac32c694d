"""The forecast of the report and the alert: measured entropy and delta_h/forward, each with its error."""

from collections.abc import Sequence

from forecasters import History
from rl_training.mathematics.forecast import Ahead, EntropyForecast

SOURCE = "rl_training/mathematics/forecast.py"


def forecast(history: History, horizons: Sequence[int]) -> list[Ahead]:
    follows = EntropyForecast()
    columns = (history.entropy, history.stderr, history.forward, history.forward_se)
    for number, seen in enumerate(zip(*(column.tolist() for column in columns), strict=True), start=1):
        follows.see(number, *seen)
    return [follows.ahead(steps) for steps in horizons]

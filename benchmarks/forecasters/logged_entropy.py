"""The same forecast from logged entropy alone, as without any probe: no errors, no predicted change."""

from collections.abc import Sequence

from forecasters import History
from rl_training.mathematics.forecast import Ahead, EntropyForecast

SOURCE = "rl_training/mathematics/forecast.py"


def forecast(history: History, horizons: Sequence[int]) -> list[Ahead]:
    follows = EntropyForecast()
    for number, entropy in enumerate(history.entropy.tolist(), start=1):
        follows.see(number, entropy)
    return [follows.ahead(steps) for steps in horizons]

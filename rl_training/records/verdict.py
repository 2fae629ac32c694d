"""Whether the first order can be trusted at a step that was analysed: the tested difference, in one sentence.

The first order fails where its difference from what was measured on the same sequences

    is beyond its own error (95 %), and
    at least half of the prediction, or of the prediction's standard error where that is larger: less would not show.

A second-order difference scales with the square of the step: at η times the step its share of the prediction is η times
as large. So some η = 1/2, 1/4, … makes it less than half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

MILLI = 1e3
HALF, Z_95 = 0.5, 1.96
KEYS = ("deltaH1", "deltaH_true", "paired_error")


def verdict(step: int, results: Mapping[str, float | None]) -> str:
    """Returns the sentence for a step (counted from 1) at which the first order fails; "" where it holds or is unknown.

    results  of a checkpoint analysis: numbers by key, with `…_se`; None or nan where there is none
    """

    def known(key: str) -> float:
        value = results.get(key)
        return math.nan if value is None else value

    predicted, _, apart = (known(key) for key in KEYS)
    size = max(abs(predicted), known("deltaH1_se"))  # the first where the second is nan
    if not (abs(apart) > Z_95 * known("paired_error_se") and abs(apart) >= HALF * size):
        return ""
    does = "add to" if apart * predicted <= 0 else "outweigh" if abs(apart) > 1.5 * abs(predicted) else "cancel"
    halvings = math.floor(math.log2(abs(apart) / (HALF * size))) + 1
    told = (f"{MILLI * known(key):+.3f} ± {MILLI * known(f'{key}_se'):.3f}" for key in KEYS)
    return (
        f"Step {step}: higher orders {does} the first: do not trust forward alone at this learning rate. "
        "Predicted {}, measured {}, difference {} (1e-3 nats per token). ".format(*told)
        + f"If it is second order, it would be less than half of the prediction at 1/{2**halvings} of the step."
    )

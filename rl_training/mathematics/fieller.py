"""The interval of a ratio of two estimates whose errors are known together."""

from __future__ import annotations

import math

from scipy.special import stdtrit
from torch import Tensor


def fieller_interval(means: Tensor, covariance: Tensor, degrees: float, coverage: float = 0.95) -> tuple[float, float]:
    """Returns Fieller's interval of numerator / denominator.

    means       (2,), denominator T and numerator S          covariance  (2, 2), of the two
    degrees     of freedom of the covariance, for Student-t

    It holds the ρ that the data do not speak against: with q Student's quantile,

        (S − ρT)² ≤ q² (V_SS − 2ρ V_TS + ρ² V_TT).

    Unlike value ± q·stderr of the ratio, this asks only S and T to be normal. (−∞, ∞) where T itself is lost in its
    error. Example, T = 1 without error, S = 3 ± 1 and infinitely many degrees: 3 ± 1.96.

    Source: Fieller 1954, "Some problems in interval estimation".
    """
    quantile = float(stdtrit(degrees, 0.5 + 0.5 * coverage))
    denominator, numerator = means.tolist()
    (of_denominator, mixed), (_, of_numerator) = (quantile**2 * covariance).tolist()
    square = denominator**2 - of_denominator
    linear, constant = denominator * numerator - mixed, numerator**2 - of_numerator
    if not square > 0:
        return -math.inf, math.inf
    half = math.sqrt(max(linear**2 - square * constant, 0.0))  # below 0 by rounding only: S/T is always inside
    return (linear - half) / square, (linear + half) / square

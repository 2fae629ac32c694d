"""How far a sum of differences of mean 0 may stray by chance, at any of the times at which it is looked at.

Let each x_i have mean 0 and variance v_i given everything before it (a martingale difference), whatever its
distribution. With S = Σ x_i, V = Σ v_i and

    Q = (Σ x_i² + 2 V) / 3,

exp(λS − λ²Q/2) is a supermartingale for every λ, because e^(y − y²/6) ≤ 1 + y + y²/3 for every real y, and therefore
E exp(λx − λ²x²/6) ≤ 1 + λ²v/3 ≤ exp(λ²v/3) (Delyon 2009, theorem 4). No tail is assumed: a rare large x adds to Q what
V alone, which is small where only rare values are large, would not allow for. On average Q is V.

The mean of exp(λS − λ²Q/2) over λ ~ N(0, 1/R) is a supermartingale too, and starts at 1,

    M = √(R / (Q + R)) exp(S² / 2(Q + R)).

By Ville's inequality M ever reaches 1/α with probability at most α, over any number of looks (Robbins 1970). Solved for
|S| this is the `bound`. It is two-sided: λ has either sign, so α is the probability of both signs together. R only
decides at which Q the bound is tightest, in units of √Q: a little above R.
"""

from __future__ import annotations

import math

R = 25.0


def bound(quadratic: float, alpha: float) -> float:
    """Return what |S| never reaches with probability 1 − `alpha`, while Q runs through any values.

    Args:
        quadratic: Q at this look.
        alpha: The probability of a false alarm at any look.

    >>> [round(bound(q, 0.005) / q**0.5, 1) for q in (1e2, 1e4, 1e6)]
    [3.9, 4.1, 4.6]
    """
    spread = quadratic + R
    return math.sqrt(spread * (2.0 * math.log(1.0 / alpha) + math.log(spread / R)))

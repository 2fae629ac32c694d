"""The search for the factor on a step's learning rate that gives the step its target KL: a function of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rl_training.errors import UserError
from rl_training.statistics.estimate import DESCRIBES_STEP, Estimate
from rl_training.statistics.unavailable import Unavailable

MAX_KL_OVER_TARGET = 2.0  # times the target: up to this KL a step is left as it is
MIN_SHRINK, MAX_SHRINK = 0.1, 0.7  # each further try multiplies the factor by .1 to .7
MAX_GROWTH = 2.0  # a step starts with at most this multiple of the last factor
MAX_TRIES = 8  # after the first factor
NEW_WEIGHT = 0.4  # of the new step in the geometric mean of curvatures
MIN_KL_RATIO = 2.5  # least ratio of the KL at half a step to that at a quarter: 4 without rounding and higher orders
RATE_IS_ZERO = Unavailable("rate_is_zero", "the schedule's learning rate is 0 at this step: no weight moves")
NO_TARGET = Unavailable(
    "no_kl_target",
    "the target is {target:g} and the batch's entropy {entropy:g} nats per token: this step has the learning rate 0",
)
NO_KL = Unavailable("no_kl", "the step's KL is {kl} at every length tried: this step has the learning rate 0")


@dataclass(frozen=True)
class BoundState:
    """What one step passes on to the next. Checkpoints store it."""

    factor: float = 1.0  # multiplies the scheduled learning rate
    curvature: float = math.nan  # geometric mean of KL / (learning rate)² over the last steps; nan before the first

    def starting_factor(self, target: float, rate: float) -> float:
        """Return the first factor to try, .1 to 2 times the last: with the averaged curvature it meets the target.

        Args:
            target: nats per token.
            rate: The scheduled learning rate.
        """
        if math.isnan(self.curvature):
            return self.factor
        meets_target = math.sqrt(target / self.curvature) / rate
        return min(MAX_GROWTH * self.factor, max(MIN_SHRINK * self.factor, meets_target))

    def after(self, info: BoundInfo, rate: float = 1.0) -> BoundState:
        """Return the state after a step. It remains if no weight moved, or if the KL is finite at no length.

        Args:
            info: How the factor of the step was found.
            rate: The scheduled learning rate.
        """
        if not info.kl > 0.0:  # also if it is nan
            return self
        curvature = info.kl / (info.factor * rate) ** 2
        if not math.isnan(self.curvature):
            curvature = self.curvature ** (1.0 - NEW_WEIGHT) * curvature**NEW_WEIGHT
        return BoundState(info.factor, curvature)


@dataclass(frozen=True)
class BoundInfo:
    """How the factor of a step was found."""

    target: float  # nats per token
    first_kl: float  # at the first factor tried, nats per token
    kl: float  # at the final factor, nats per token
    tries: int  # number of factors tried after the first
    first_factor: float  # the first one tried
    factor: float  # 0 if the step could not be measured
    reason: str = DESCRIBES_STEP  # why there is no error bar, or no measurement
    measured_kl: Estimate | None = None  # `kl` with its error, if it was measured

    @property
    def share(self) -> float:
        """The share of the first step length that remains."""
        return self.factor / self.first_factor if self.first_factor else 1.0

    def estimates(self, rate: float) -> dict[str, Estimate]:
        """Return metrics of how the step was bounded, with the largest learning rate of the optimizer's groups."""
        numbers = {
            "target_kl": self.target,
            "kl": self.kl,
            "first_kl": self.first_kl,
            "kept_share": self.share,
            "tries": float(self.tries),
            "rate_factor": self.factor,
            "learning_rate": rate,
        }
        estimates = {f"bound/{name}": Estimate(value, reason=self.reason) for name, value in numbers.items()}
        return estimates if self.measured_kl is None else estimates | {"bound/kl": self.measured_kl}


def search_factor(kl_of: Callable[[float], float], target: float, state: BoundState, rate: float = 1.0) -> BoundInfo:
    """Find a factor for the step whose KL is at most twice the target, or the last of MAX_TRIES after the first.

    Args:
        kl_of: Maps a factor to the KL per token of the step scaled by it, in nats. nan or inf if the policy breaks.
        target: nats per token, positive and finite.
        state: From the previous step.
        rate: The scheduled learning rate, positive.

    Returns:
        How the factor was found. If the KL is finite at no length, the factor is 0.

    >>> info = search_factor(lambda factor: 0.04 * factor**2, target=0.01, state=BoundState())
    >>> info.tries, round(info.factor, 6), round(info.kl, 6)
    (1, 0.5, 0.01)
    """
    first_factor = state.starting_factor(target, rate)
    first_kl = kl_of(first_factor)
    factor = first_factor
    kl = first_kl
    tries = 0
    while not kl <= MAX_KL_OVER_TARGET * target and tries < MAX_TRIES:
        factor *= min(MAX_SHRINK, max(MIN_SHRINK, math.sqrt(target / kl))) if math.isfinite(kl) else MIN_SHRINK
        kl = kl_of(factor)
        tries += 1
    if math.isfinite(kl):
        return BoundInfo(
            target=target,
            first_kl=first_kl,
            kl=kl,
            tries=tries,
            first_factor=first_factor,
            factor=factor,
        )
    return BoundInfo(
        target=target,
        first_kl=math.nan,
        kl=math.nan,
        tries=tries,
        first_factor=first_factor,
        factor=0.0,
        reason=NO_KL.formatted(kl=kl),
    )


def info_without_search(target: float, entropy: float, rate: float, state: BoundState) -> BoundInfo | None:
    """Return what is known of a step without a KL to aim at; None if there is one.

    Args:
        target: nats per token.
        entropy: The batch's, nats per token.
        rate: The schedule's largest learning rate.
        state: From the previous step.
    """
    if rate == 0.0:
        return BoundInfo(
            target=0.0,
            first_kl=0.0,
            kl=0.0,
            tries=0,
            first_factor=state.factor,
            factor=state.factor,
            reason=RATE_IS_ZERO,
        )
    if 0.0 < target < math.inf:
        return None
    return BoundInfo(
        target=target if target == 0.0 else math.nan,
        first_kl=math.nan,
        kl=math.nan,
        tries=0,
        first_factor=state.factor,
        factor=0.0,
        reason=NO_TARGET.formatted(target=target, entropy=entropy),
    )


def require_quadratic_kl(kl_of: Callable[[float], float], info: BoundInfo) -> None:
    """Check that half of a step has about four times the KL of a quarter.

    Raises:
        UserError: Rounding is as large as the target, so steps would silently be cut to nothing.
    """
    quarter = kl_of(info.factor / 4.0)
    half = kl_of(info.factor / 2.0)
    if half < MIN_KL_RATIO * quarter:
        raise UserError(
            f"target_kl_share: a step with the KL {info.kl:.1e} has {half:.1e} at half its length and {quarter:.1e} at "
            f"a quarter, where a ratio of 4 was expected: rounding hides smaller steps. Keep fp32 weights, or raise "
            f"the target of {info.target:.1e} nats per token"
        )

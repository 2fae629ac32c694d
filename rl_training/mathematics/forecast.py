"""Where token entropy will be some steps ahead: log H and its rate as one state, which a Kalman filter follows.

    x' = x + v + N(0, Q1)       x = log H, v = its change by one step
    v' = φ v + N(0, Q2)         a rate is half forgotten after ln 2 / −ln φ steps, 8 at φ = .92
    log H measured = x ± se/H,  its variance averaged over steps; ± one of UNKNOWN_NOISE without error bars
    forward / H    = v ± se/H

    in n steps: x + v (1 − φⁿ)/(1 − φ), its variance carried along; H itself is lognormal and never below 0

Q1 and Q2 were chosen on other runs (105k parameters). So one filter runs for each pair of multiples of them, weighted
by how well it has predicted this run's next values: p(constants | values so far), with a prior around those chosen.
With the scale of largest weight, one-step misses over their standard deviations have variance 1. A forecast has the
mean and the variance of that mixture. A miss counts as three standard deviations at most in the filter, and by
Huber's loss in the weights: one odd batch says little.

Sources: Kalman 1960; the damped rate, Gardner & McKenzie 1985; several models at once, Magill 1965; Huber 1964.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import softmax

HORIZONS = (10, 20, 50)  # steps; beyond the last, no forecast skill was found
FEWEST = 20  # misses with which a run begins to know its own constants
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
PRIOR_SPREAD = math.log(4)  # one standard deviation of the logarithm of a factor
UNKNOWN_NOISE = (0.02, 0.04, 0.08, 0.16)  # relative, of a batch's entropy that comes without an error
CUT = 3.0  # standard deviations
NORMAL_975 = 1.959964


@dataclass(frozen=True)
class Dynamics:
    """The constants of the model, per optimizer step."""

    level_noise: float = 3e-4  # Q1
    rate_noise: float = 1e-4  # Q2
    damping: float = 0.92  # φ
    first_rate: float = 0.03  # standard deviation of v before anything is seen


@dataclass(frozen=True)
class Ahead:
    """The forecast of entropy at one future step: log H is normal."""

    mean: float
    sd: float

    @property
    def median(self) -> float:
        return math.exp(self.mean)

    @property
    def range(self) -> tuple[float, float]:
        """Returns the ends of the 95 % range, nats."""
        reach = NORMAL_975 * self.sd
        return math.exp(self.mean - reach), math.exp(self.mean + reach)

    def chance_below(self, level: float) -> float:
        """Returns the probability that entropy is below a level, nats, at that step."""
        return 0.5 * math.erfc((self.mean - math.log(level)) / self.sd / math.sqrt(2))


class EntropyForecast:
    """Follows the entropy of a run: `see` each measured step, in their order, then ask `ahead`.

    factors  multiples of both noise constants that are weighed; (1.0,) leaves them as they are
    """

    def __init__(self, dynamics: Dynamics | None = None, factors: tuple[float, ...] = FACTORS) -> None:
        self._dynamics = dynamics or Dynamics()
        logs, noises = np.log(factors), np.square(UNKNOWN_NOISE)
        level, rate, self._unknown = (axis.ravel() for axis in np.meshgrid(logs, logs, noises, indexing="ij"))
        self._noise = self._dynamics.level_noise * np.exp(level), self._dynamics.rate_noise * np.exp(rate)
        self._log_weight = -0.5 * (level**2 + rate**2) / PRIOR_SPREAD**2
        self._state: tuple[np.ndarray, ...] = ()  # by constants: x, v, their variances and, between, their covariance
        self._seen_variance = [0.0, 0.0]  # relative, summed with weights; the sum of the weights
        self.step = 0  # the one seen last; 0 before the first
        self.misses = 0  # number of one-step forecasts of log H compared with the measured value

    def see(
        self, step: int, entropy: float, stderr: float = math.nan, change: float = math.nan, change_se: float = math.nan
    ) -> None:
        """Takes the entropy measured at a step, nats, and its predicted change by that step; nan: not known.

        Values that are not positive numbers have no logarithm and are skipped.
        """
        if not (math.isfinite(entropy) and entropy > 0):
            return
        log_entropy = np.asarray(math.log(entropy))
        noise = self._relative_variance(stderr / entropy)
        if self._state:
            for _ in range(step - self.step):
                self._state = self._stepped(self._state)
            self._observe(0, log_entropy, noise)
            self.misses += 1
        else:
            zero = np.zeros_like(self._log_weight)
            self._state = zero + log_entropy, zero, zero + noise, zero, zero + self._dynamics.first_rate**2
        self.step = step
        if math.isfinite(change) and math.isfinite(change_se):
            level = np.exp(self._state[0])
            self._observe(1, change / level, (change_se / level) ** 2)

    def _relative_variance(self, relative_stderr: float) -> np.ndarray:
        """Returns the variance of log H measured: averaged, because one step's error bar is itself uncertain."""
        if math.isfinite(relative_stderr):
            total, weight = self._seen_variance
            self._seen_variance = [0.8 * total + relative_stderr**2, 0.8 * weight + 1]
        total, weight = self._seen_variance
        return np.full_like(self._unknown, total / weight) if weight else self._unknown

    def _stepped(self, state: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        x, v, xx, xv, vv = state
        level_noise, rate_noise = self._noise
        p = self._dynamics.damping
        return x + v, p * v, xx + 2 * xv + vv + level_noise, p * (xv + vv), p * p * vv + rate_noise

    def _observe(self, which: int, value: np.ndarray, noise: np.ndarray) -> None:
        """Takes a measured x (0) or v (1) with the variance of its noise."""
        x, v, xx, xv, vv = self._state
        mine, with_x, with_v = (x, xx, xv) if which == 0 else (v, xv, vv)
        variance = noise + (xx if which == 0 else vv)
        miss = (value - mine) / np.sqrt(variance)
        loss = np.where(abs(miss) <= CUT, miss**2, 2 * CUT * abs(miss) - CUT**2)
        self._log_weight = self._log_weight - 0.5 * (np.log(variance) + loss)
        gain = miss.clip(-CUT, CUT) / np.sqrt(variance)
        self._state = (
            x + with_x * gain,
            v + with_v * gain,
            xx - with_x**2 / variance,
            xv - with_x * with_v / variance,
            vv - with_v**2 / variance,
        )

    def ahead(self, steps: int) -> Ahead:
        """Returns the forecast for so many steps after the one seen last. ValueError before the first."""
        if not self._state:
            raise ValueError("no entropy has been seen: there is nothing to forecast from")
        state = self._state
        for _ in range(steps):
            state = self._stepped(state)
        weight = softmax(self._log_weight)
        mean = weight @ state[0]
        variance = weight @ (state[2] + (state[0] - mean) ** 2)
        return Ahead(float(mean), math.sqrt(float(variance)))

    def constants(self) -> tuple[float, float]:
        """Returns Q1 and Q2 as estimated from this run so far: geometric means over the weights."""
        weight = softmax(self._log_weight)
        level, rate = (math.exp(float(weight @ np.log(noise))) for noise in self._noise)
        return level, rate

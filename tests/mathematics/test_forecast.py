"""The forecast of entropy: against its model as one large Gaussian, closed forms, and its coverage on itself."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest

from rl_training.mathematics.forecast import FEWEST, HORIZONS, Ahead, Dynamics, EntropyForecast

EXACT = 1e-9  # relative standard error of what is measured without noise
STILL = Dynamics(level_noise=0.0, rate_noise=0.0)


def joint_gaussian(
    dynamics: Dynamics, steps: list[int], log_entropy: list[float], noise: list[float], ahead: int
) -> tuple[float, float, float]:
    """Returns mean and variance of log H, by conditioning the joint normal of all states on all measurements.

    And the logarithm of the measurements' density, without its constant.

    Unknown are v₁ and the noises of every step; x₁ is what was measured first, with its error.
    """
    last, p = steps[-1] + ahead, dynamics.damping
    # rows: x and v at each step; columns: x₁'s error, v₁, then each step's two noises
    count = 2 + 2 * (last - steps[0])
    x, v = np.zeros((last - steps[0] + 1, count)), np.zeros((last - steps[0] + 1, count))
    x[0, 0], v[0, 1] = 1, 1
    for i in range(1, len(x)):
        x[i], v[i] = x[i - 1] + v[i - 1], p * v[i - 1]
        x[i, 2 * i], v[i, 2 * i + 1] = 1, 1
    sources = [noise[0], dynamics.first_rate**2] + [dynamics.level_noise, dynamics.rate_noise] * (last - steps[0])
    prior = np.diag(sources)
    seen = x[[step - steps[0] for step in steps[1:]]]
    covariance = seen @ prior @ seen.T + np.diag(noise[1:])
    misses = np.array(log_entropy[1:]) - log_entropy[0]
    gain = prior @ seen.T @ np.linalg.inv(covariance)
    posterior = prior - gain @ seen @ prior
    density = -0.5 * (np.linalg.slogdet(covariance)[1] + misses @ np.linalg.solve(covariance, misses))
    return log_entropy[0] + x[-1] @ gain @ misses, x[-1] @ posterior @ x[-1], density


STEPS, LOGS = [3, 4, 5, 8, 9, 15], [-1.0, -1.05, -1.02, -1.2, -1.18, -1.35]


def following(forecast: EntropyForecast) -> EntropyForecast:
    for step, log in zip(STEPS, LOGS, strict=True):
        forecast.see(step, math.exp(log), 0.05 * math.exp(log))  # a variance that is the same at each step: .05²
    return forecast


@pytest.mark.parametrize("ahead", [0, 1, 20])
def test_it_is_the_joint_normal_of_all_states_given_all_measurements_also_where_steps_are_left_out(ahead: int) -> None:
    mean, variance, _ = joint_gaussian(Dynamics(), STEPS, LOGS, [0.05**2] * 6, ahead)
    said = following(EntropyForecast(Dynamics(), (1.0,))).ahead(ahead)
    assert said.mean == pytest.approx(mean, rel=1e-10)
    assert said.sd**2 == pytest.approx(variance, rel=1e-10)


def test_constants_are_weighed_by_prior_and_density_and_a_forecast_has_the_moments_of_the_mixture() -> None:
    """Four pairs: 4 is one standard deviation of the prior's logarithm, 1/2 is half of one. No miss is beyond three."""
    weights, means, variances, logs = [], [], [], []
    prior = {0.5: 0.5**2, 4.0: 1.0}
    for level, rate in itertools.product(prior, repeat=2):
        constants = Dynamics(level * 3e-4, rate * 1e-4)
        mean, variance, density = joint_gaussian(constants, STEPS, LOGS, [0.05**2] * 6, 20)
        weights.append(math.exp(density - 0.5 * (prior[level] + prior[rate])))
        means.append(mean)
        variances.append(variance)
        logs.append(np.log([constants.level_noise, constants.rate_noise]))
    weights = np.array(weights) / sum(weights)
    forecast = following(EntropyForecast(factors=(0.5, 4.0)))
    mean = weights @ means
    assert np.ptp(means) > 0.01
    assert forecast.ahead(20).mean == pytest.approx(mean, rel=1e-10)
    assert forecast.ahead(20).sd ** 2 == pytest.approx(weights @ (variances + (means - mean) ** 2), rel=1e-10)
    assert forecast.constants() == pytest.approx(tuple(np.exp(weights @ np.array(logs))), rel=1e-10)


def test_a_miss_beyond_three_standard_deviations_weighs_by_hubers_loss() -> None:
    """The second value is off by d: z² up to z = 3, then 6 |z| − 9; its variance 2 se² + .03² + Q1."""
    forecast, d = EntropyForecast(factors=(0.25, 4.0)), 0.5
    forecast.see(1, 1.0, 0.05)
    forecast.see(2, math.exp(d), 0.05 * math.exp(d))
    levels = np.array([0.25 * 3e-4, 4.0 * 3e-4])
    variance = 2 * 0.05**2 + 0.03**2 + levels
    z = d / np.sqrt(variance)
    assert z.min() > 5
    weights = np.exp(-0.5 * (np.log(variance) + 6 * z - 9))
    assert forecast.constants()[0] == pytest.approx(np.exp(weights @ np.log(levels) / weights.sum()), rel=1e-10)


def test_a_predicted_change_counts_by_its_variance_beside_what_is_known_of_the_rate() -> None:
    """v is 0 ± .03 before; δH/H = −.02 ± .015 is seen: v = −.02 · 4/5, its variance .03² / 5. One step on x = v."""
    forecast = EntropyForecast(Dynamics(0.0, 0.0), (1.0,))
    forecast.see(1, 0.5, 0.5 * EXACT, -0.01, 0.0075)
    said = forecast.ahead(1)
    assert said.mean - math.log(0.5) == pytest.approx(-0.016, rel=1e-6)
    assert said.sd == pytest.approx(0.03 / math.sqrt(5), rel=1e-6)
    # in 20 steps v (1 − .92²⁰)/.08 of it
    assert forecast.ahead(20).mean - math.log(0.5) == pytest.approx(-0.016 * (1 - 0.92**20) / 0.08, rel=1e-6)


def test_range_and_chance_are_those_of_a_lognormal() -> None:
    """Φ(1) = .841345 and the 97.5 % quantile 1.959964, from a printed table."""
    said = Ahead(math.log(0.1), 0.5)
    assert said.range == pytest.approx((0.1 * math.exp(-0.979982), 0.1 * math.exp(0.979982)))
    assert said.chance_below(0.1 * math.exp(0.5)) == pytest.approx(0.841345, abs=1e-6)
    assert said.chance_below(0.1) == 0.5


def test_an_odd_batch_moves_it_no_further_than_three_standard_deviations_would() -> None:
    after = []
    for sigmas in (3.0, 50.0):
        forecast = EntropyForecast(factors=(1.0,))
        forecast.see(1, 1.0, 0.05)
        sd = math.sqrt(0.05**2 + 0.03**2 + 3e-4 + 0.05**2)  # of the next value: x, v, Q1, its own noise
        entropy = math.exp(sigmas * sd)
        forecast.see(2, entropy, 0.05 * entropy)
        after.append(forecast.ahead(20))
    assert after[0].mean == pytest.approx(after[1].mean, rel=1e-9)


def test_what_has_no_logarithm_is_passed_over_and_nothing_is_said_before_the_first_value() -> None:
    forecast = EntropyForecast()
    for entropy in (math.nan, 0.0, -1.0, math.inf):
        forecast.see(1, entropy)
    with pytest.raises(ValueError, match="no entropy has been seen"):
        forecast.ahead(20)
    forecast.see(2, 0.3)
    assert (forecast.step, forecast.misses) == (2, 0)


# --- series of the model itself -------------------------------------------------------------------------------------

LEVEL_SE, RATE_SE = 0.03, 0.01  # relative, of what is measured


@functools.cache
def series(seed: int, times: tuple[float, float], steps: int = 200) -> np.ndarray:
    """Returns rows x, measured log H, measured v of a run whose Q1 and Q2 are so many times the usual ones."""
    rng, d = np.random.default_rng(seed), Dynamics()
    x, v, rows = -2.0, rng.normal(0, d.first_rate), []
    for _ in range(steps):
        rows.append((x, x + rng.normal(0, LEVEL_SE), v + rng.normal(0, RATE_SE)))
        x += v + rng.normal(0, math.sqrt(times[0] * d.level_noise))
        v = d.damping * v + rng.normal(0, math.sqrt(times[1] * d.rate_noise))
    return np.array(rows)


def follow(seed: int, times: tuple[float, float]) -> tuple[EntropyForecast, list[float], dict[int, list[bool]]]:
    """Returns the forecast at the end, the standardised one-step misses after step 50, and which ranges held."""
    forecast, misses, held = EntropyForecast(), [], {horizon: [] for horizon in HORIZONS}
    rows = series(seed, times)
    for step, (_, log_entropy, rate) in enumerate(rows, start=1):
        entropy = level = math.exp(log_entropy)
        if step > 1:
            ahead = forecast.ahead(1)
            level = ahead.median  # δH = v H, its error in the same unit
            misses.append((log_entropy - ahead.mean) / math.hypot(ahead.sd, LEVEL_SE))
        forecast.see(step, entropy, LEVEL_SE * entropy, rate * level, RATE_SE * level)
        if step in (30, 60, 90, 120, 150):
            for horizon in HORIZONS:
                low, high = forecast.ahead(horizon).range
                held[horizon].append(bool(low < math.exp(rows[step - 1 + horizon, 0]) < high))
    return forecast, misses[50:], held


@pytest.fixture(scope="module")
def usual() -> list[tuple[EntropyForecast, list[float], dict[int, list[bool]]]]:
    return [follow(seed, (1.0, 1.0)) for seed in range(60)]


def test_ranges_hold_93_to_97_percent_of_what_its_own_model_does(usual: list) -> None:
    for horizon in HORIZONS:
        held = [hit for _, _, runs in usual for hit in runs[horizon]]
        assert len(held) == 300
        assert 0.93 <= np.mean(held) <= 0.97, horizon


def test_a_run_learns_constants_that_are_four_times_off() -> None:
    """Of ten runs of 200 steps each, in both directions; the standard deviation of a miss then says what it is."""
    for times in ((4.0, 4.0), (0.25, 0.25), (4.0, 0.25)):
        learned, misses = [], []
        for seed in range(10):
            forecast, missed, _ = follow(seed, times)
            learned.append(np.log(forecast.constants()))
            misses += missed
        true = np.log([times[0] * 3e-4, times[1] * 1e-4])
        assert np.abs(np.mean(learned, 0) - true).max() < math.log(1.6), times
        assert 0.9 < np.var(misses) < 1.15, times  # with the usual constants 1.86, .85, 1.79


def test_before_anything_is_learned_the_constants_are_those_chosen(usual: list) -> None:
    assert EntropyForecast().constants() == pytest.approx((3e-4, 1e-4))
    assert usual[0][0].misses == 199 > FEWEST

"""The noise of a curve whose trend is unknown: its standard deviation, its correlation, and its spikes.

Model: values are a smooth curve plus noise whose correlation over k values is ρᵏ (autoregressive of first order), plus
spikes. Second differences leave next to nothing of a smooth curve, so their variances tell the noise without a fit:

    of neighbours          y[t−1] − 2 y[t] + y[t+1]    2σ² (1 − ρ)(3 − ρ)
    of every other value   y[t−2] − 2 y[t] + y[t+2]    2σ² (1 − ρ²)(3 − ρ²)

Their ratio, (1 + ρ)(3 − ρ²)/(3 − ρ), gives ρ, and then σ. For independent noise this is the estimator of Gasser, Sroka
and Jennen-Steinmetz 1986 (doi 10.1093/biomet/73.3.625); Hall and Van Keilegom 2003 (J. R. Statist. Soc. B 65, 443) use
differences at several lags for autoregressive noise. Medians and cut-offs keep single spikes out of it.

Thresholds were chosen by hand; PRIOR_VALUES was changed when curves of benchmarks/stories.py were first judged.
"""

from __future__ import annotations

import math

import numpy as np

MIN_FOR_CORRELATION = 8  # values: with fewer, two lags have too few differences, and noise counts as independent
MAX_CORRELATION = 0.7  # of neighbouring values: beyond, noise cannot be told from a trend
PRIOR_VALUES = 4  # by which the estimated correlation of a short series is drawn towards 0
SPIKE = 4.0  # standard deviations from the neighbours' median at which a value is cut off
CUT_OFF = 2.5  # standard deviations at which differences are cut off
# Undoes what the cut-off takes from the variance. Of 8 to 3,000 values of independent normal noise, the variance is
# then on average between 3 % too small and 4 % too large (simulated).
CORRECTION = 1.06
NORMAL = 1.4826  # standard deviation of a normal variable over the median of its absolute deviation


def noise_of_mean(values: np.ndarray) -> float:
    """Return σ√((1 + ρ)/(1 − ρ)): over √n, the standard error of the mean of n values of the noise.

    Args:
        values: At least three values, equally spaced.
    """
    variance = _trimmed_variance(_second_differences(values, 1))
    if not variance > 0:
        return 0.0
    rho = 0.0
    if len(values) >= MIN_FOR_CORRELATION:
        rhos = np.linspace(0.0, MAX_CORRELATION, 50)
        ratios = (1 + rhos) * (3 - rhos**2) / (3 - rhos)
        rho = float(np.interp(_trimmed_variance(_second_differences(values, 2)) / variance, ratios, rhos))
        rho *= len(values) / (len(values) + PRIOR_VALUES)
    return math.sqrt(variance / (2 * (1 - rho) * (3 - rho)) * (1 + rho) / (1 - rho))


def without_spikes(values: np.ndarray) -> np.ndarray:
    """Return the values, those more than SPIKE deviations from the median of five neighbours moved to that distance."""
    padded = np.pad(values, 2, mode="edge")
    middle = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)
    spread = deviation_by_median(values - middle) or deviation_by_median(np.diff(values)) / math.sqrt(2)
    return np.clip(values, middle - SPIKE * spread, middle + SPIKE * spread) if spread > 0 else values


def _second_differences(values: np.ndarray, lag: int) -> np.ndarray:
    return values[: -2 * lag] - 2 * values[lag:-lag] + values[2 * lag :]


def deviation_by_median(values: np.ndarray) -> float:
    """Return the standard deviation of normal values by the median of their absolute deviations."""
    return NORMAL * float(np.median(np.abs(values - np.median(values))))


def _trimmed_variance(changes: np.ndarray) -> float:
    """Return the variance of changes, those beyond CUT_OFF moved there, with CORRECTION; 0 if most are the same."""
    changes = changes - np.median(changes)
    limit = CUT_OFF * deviation_by_median(changes)
    return CORRECTION * float(np.clip(changes, -limit, limit).var()) if limit > 0 else 0.0

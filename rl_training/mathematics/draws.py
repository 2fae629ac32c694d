"""A few of many terms, drawn so that their reweighted sum has the sum of all as its mean. Pure functions.

Of the terms x_i of a stratum some are drawn, i with inclusion probability π_i, and the sum over them of x_i / π_i is
unbiased for the sum of all (Horvitz & Thompson 1952). Its noise is least where π_i is in proportion to |x_i|. What is
known of |x_i| beforehand is a guess a_i, so that a share of the probability is spread evenly: a term whose guess is far
too small then has a weight of a few, and not of thousands,

    π_i ∝ (1 − EVEN) a_i / Σ a  +  EVEN / n,        Σ π_i = the number drawn.

They are drawn by systematic sampling: with the terms laid one after another as intervals of length π_i, those are taken
in which one of the points u, u + 1, u + 2, … falls, u uniform in [0, 1).

Source: Horvitz & Thompson 1952, "A generalization of sampling without replacement"; Madow 1949 (systematic sampling).
"""

from __future__ import annotations

import torch
from torch import Tensor

EVEN = 0.2  # share of the probability that no guess decides about


def inclusion_probabilities(guesses: Tensor, stratum: Tensor, counts: Tensor) -> Tensor:
    """Returns π, (n,) fp64 in (0, 1], whose sum over each stratum is its count.

    guesses  (n,) ≥ 0, of |x_i| up to a factor; where all of a stratum's are 0, they count as equal
    stratum  (n,) int, 0 .. S−1            counts  (S,), how many to draw of each: at least 1, at most its size

    Where a term's share would be above 1 it is drawn for certain, and the others share what is left.
    """
    num_strata = len(counts)
    left, free = counts.double(), torch.ones(len(guesses), dtype=torch.bool, device=guesses.device)
    probability = torch.ones(len(guesses), dtype=torch.float64, device=guesses.device)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(num_strata).index_add_(0, stratum, values)

    guesses = guesses.double()
    while True:
        size = total(free.double()).clamp(min=1.0)
        known = total(guesses * free)
        by_guess = torch.where(known[stratum] > 0, guesses / known[stratum], 1.0 / size[stratum])
        share = left[stratum] * ((1.0 - EVEN) * by_guess + EVEN / size[stratum])
        probability = torch.where(free, share, probability)
        above = free & (probability > 1.0)
        if not bool(above.any()):
            return probability.clamp(max=1.0)
        probability[above] = 1.0
        free &= ~above
        left = left - total(above.double())


def drawn(probability: Tensor, stratum: Tensor, uniforms: Tensor) -> Tensor:
    """Returns which terms are drawn, (n,) bool: of each stratum as many as its probabilities add up to.

    stratum   (n,) int, 0 .. S−1          uniforms  (S,), in [0, 1), one random number of each stratum

    Example: drawn([.25, .25, .5], [0, 0, 0], [.3]) == [False, True, False]: the point .3 falls into [.25, .5).
    """
    order = stratum.argsort(stable=True)
    lengths, of = probability[order].double(), stratum[order]
    ends = lengths.cumsum(0)
    sizes = torch.bincount(stratum, minlength=len(uniforms))
    first = sizes.cumsum(0) - sizes  # position of each stratum's first term
    ends = ends - (ends - lengths)[first][of]
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    starts[first[sizes > 0]] = 0.0
    last = (first + sizes - 1)[sizes > 0]
    ends[last] = ends[last].round()  # a whole number, but for rounding
    # Points u + j with start ≤ u + j < end: one more than those below `start` is below `end`.
    taken = (ends - uniforms[of]).ceil() - (starts - uniforms[of]).ceil() > 0
    result = torch.empty_like(taken)
    result[order] = taken
    return result


def uniforms_of(keys: Tensor, seed: int, step: int) -> Tensor:
    """Returns a number in [0, 1) for each key, fp64: the same for the same key, seed and step, on any device.

    keys  (n,) int64. No random stream is touched: it is SplitMix64's output function (Steele, Lea & Flood 2014).
    """
    mixed = _mix(keys + _mix(torch.tensor([seed], device=keys.device) + _mix(torch.tensor([step], device=keys.device))))
    return ((mixed >> 11) & (2**53 - 1)).double() / 2.0**53


def keys_of(ids: Tensor, mask: Tensor) -> Tensor:
    """Returns a key for each left-padded sequence of tokens, (B,) int64: equal for equal tokens, whatever the padding.

    ids, mask  (B, T), 1 on tokens
    """
    from_the_end = torch.arange(ids.shape[1], 0, -1, device=ids.device)
    return _mix((mask * (ids + 1) * _mix(from_the_end)).sum(dim=1))


def _mix(value: Tensor) -> Tensor:
    """Returns SplitMix64's output function of int64, which wraps around: every bit of it depends on every bit."""
    value = value + _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ _shifted(value, shift)) * _signed(factor)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Returns value >> bits with zeros coming in, as of an unsigned number."""
    return (value >> bits) & (2 ** (64 - bits) - 1)


def _signed(unsigned: int) -> int:
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned

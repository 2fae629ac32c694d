"""The change of entropy between two policies, from sequences that were sampled from the first. Pure functions.

Sequences t_i ~ π are scored under π and under π'. Let S be the log-probability of a sequence, T its length and
H = Σ_k h_k the sum of the exact next-token entropies along it (the Rao-Blackwell form: same expectation as −S, less
noise). Self-normalised importance sampling (SNIS) gives

    w_i = exp(S'_i − S_i)
    ΔH_seq = Σ w H' / Σ w   − Σ H / N          nats per sequence
    ΔH_tok = Σ w H' / Σ w T − Σ H / Σ T        nats per token
    ESS = (Σ w)² / Σ w²                        Kish: the number of equally weighted sequences that are as good

Weights are not clipped, because clipping is a hidden bias. (They are computed relative to the largest, which cancels:
none overflows, and not all underflow.) If the ESS is below MIN_ESS_SHARE of N, draw a second sample from π' and take
the difference between the samples. Common random numbers pair their sequences, one pair per prompt. If scores are known
token by token, per_decision.py has less noise on the same sequences.

MIN_ESS_SHARE is close to 1 because the ESS cannot see what was not drawn: sequences that are frequent under π' and rare
under π. A sample without them has even weights, and both its change and its error bar are too small. The Pareto k̂ of
the weights (Vehtari et al. 2024) does not help: if π is peaked, it exceeds 1 even for small steps
(benchmarks/README.md). Paired differences cost a second sample, but below about MIN_ESS_SHARE their error is no larger.

Standard errors are the delete-one jackknife (jackknife.py) over independent units: single sequences (or pairs) if each
answers a different prompt, else prompts with all their responses.

Source: Owen 2013, "Monte Carlo theory, methods and examples", ch. 9.2 (SNIS) and 8.6 (common random numbers).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.entropy.per_decision import MIN_SEQUENCES
from rl_training.errors import UserError
from rl_training.policy.scores import Scores
from rl_training.statistics.jackknife import JackknifeUnits, Replicates
from rl_training.statistics.kish import kish_size

# Columns of `sequence_totals`.
LOGP = 0
ENTROPY = 1
LENGTH = 2
MIN_ESS_SHARE = 0.95  # as a share of the sequences; below it draw a second sample: see the module's docstring


@dataclass(frozen=True)
class WeightStatistics:
    """Statistics of the weights w = π'(t)/π(t) of sequences t that were sampled from π."""

    ess: float  # effective number of sequences, 1 … N; nan if a log-probability is not finite
    largest: float  # the largest w; inf if float64 overflows
    smallest: float  # the smallest w


def sequence_totals(scores: Scores) -> Tensor:
    """Return each sequence's S, H and T, which are sums over its tokens, (B, 3) fp64."""
    exact = scores.exact()
    return torch.stack([exact.logps, exact.entropies, exact.mask], dim=1).sum(dim=2)


def importance_weights(before: Tensor, after: Tensor) -> WeightStatistics:
    """Return statistics of w = exp(S' − S), given all sequences' `sequence_totals` before and after, (N, 3) each."""
    weights = _relative_weights(before, after)
    log_ratio = after[:, LOGP] - before[:, LOGP]
    return WeightStatistics(kish_size(weights), float(log_ratio.max().exp()), float(log_ratio.min().exp()))


def reweighted_replicates(before: Tensor, after: Tensor, units: JackknifeUnits | None = None) -> Replicates:
    """Return the SNIS estimate of ΔH, (2,) nats per token and per sequence, with its values without each unit.

    Args:
        before: `sequence_totals` under the policy that sampled the sequences, (N, 3).
        after: The same sequences' totals under the other policy, (N, 3).
        units: Jackknife units. None: each sequence is one.

    Example: two sequences of one token with H = (1, 1), H' = (2, 4) and w = (3, 1) have ΔH = 10/4 − 2/2 = 1.5.
    """
    units = units or JackknifeUnits.of_rows(before)
    return replicates_of_terms(units.gather(change_terms(before, after, _relative_weights(before, after))))


def paired_replicates(before: Tensor, after: Tensor, units: JackknifeUnits | None = None) -> Replicates:
    """Return ΔH between two samples, (2,) nats per token and per sequence, with its values without each unit.

    Row i of both samples answers the same prompt with common random numbers.

    Args:
        before: `sequence_totals` of sequences sampled and scored under the first policy, (N, 3).
        after: `sequence_totals` of sequences sampled and scored under the second policy, (N, 3).
        units: Jackknife units. None: each pair is one.
    """
    units = units or JackknifeUnits.of_rows(before)
    return replicates_of_terms(units.gather(change_terms(before, after, torch.ones_like(before[:, 0]))))


def change_terms(before: Tensor, after: Tensor, weights: Tensor) -> Tensor:
    """Return each sequence's terms, to be summed for `change_of_sums`, (N, 6): w, wH', wT', 1, H, T."""
    columns = [weights, weights * after[:, ENTROPY], weights * after[:, LENGTH]]
    return torch.stack([*columns, torch.ones_like(weights), before[:, ENTROPY], before[:, LENGTH]], dim=1)


def change_of_sums(sums: Tensor) -> Tensor:
    """Return ΔH per token and per sequence, (..., 2), from sums of `change_terms`, (..., 6)."""
    weight, entropy_after, length_after, count, entropy, length = sums.unbind(-1)
    per_token = entropy_after / length_after - entropy / length
    return torch.stack([per_token, entropy_after / weight - entropy / count], dim=-1)


def replicates_of_terms(terms: Tensor) -> Replicates:
    """Return ΔH, (2,), and its values without each unit, given the units' `change_terms`, (N, 6).

    Raises:
        UserError: There are fewer than MIN_SEQUENCES units.
    """
    if len(terms) < MIN_SEQUENCES:
        raise UserError(f"{len(terms)} independent sequences: an error bar needs at least {MIN_SEQUENCES}")
    sums = terms.sum(dim=0)
    return Replicates(change_of_sums(sums), change_of_sums(sums - terms))


def _relative_weights(before: Tensor, after: Tensor) -> Tensor:
    """Return the weights w / max w, (N,)."""
    log_ratio = after[:, LOGP] - before[:, LOGP]
    return (log_ratio - log_ratio.max()).exp()

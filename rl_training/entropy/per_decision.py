"""The change of entropy by per-decision importance sampling (PDIS), from the scores of every token. Pure functions.

The entropy h_k at a token depends only on the tokens before it. So it needs only the ratio of its prefix, while
probes/importance.py weights whole sequences. For sequences t_i ~ π, scored under π and π',

    ρ_ik   = exp Σ_{j<k} (log π'(t_ij) − log π(t_ij))             prefix ratio; after the last token, the full ratio
    H'_seq = Σ_k  Σ_i ρ_ik m_ik h'_ik / Σ_i ρ_ik                  m_ik = 1 until sequence i has ended
    T'     = Σ_k  Σ_i ρ_ik m_ik       / Σ_i ρ_ik
    ΔH_seq = H'_seq − mean H,   ΔH_tok = H'_seq / T' − Σ H / Σ T

The normaliser at position k runs over ALL N sequences. A sequence that has ended counts with entropy 0 and with the
ratio that it ended with. If it were left out, or had weight 1, the result would be wrong for steps that make responses
longer or shorter.

To first order in the step, this is the estimator of entropy/weights.py with the baseline "buffer", in which ended
sequences count as 0; SNIS corresponds to a noisier one. So on the same sequences, PDIS and `first_order_change`, which
uses the slopes of every token's scores along the step, share their noise. Their difference is the step's second order.

Errors are delete-one jackknife over sequences, or over independent units of them, such as prompts with several
responses. Each leave-one-out value is exact, including the baseline and the normalisers.

Source: Precup, Sutton & Singh 2000, "Eligibility traces for off-policy policy evaluation" (per-decision weights).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.entropy.weights import sums_after, sums_before
from rl_training.errors import UserError
from rl_training.policy.scores import Scores
from rl_training.statistics.jackknife import JackknifeUnits, Replicates

MIN_SEQUENCES = 2  # an error bar needs one sequence to leave out and one to keep


def per_decision_change(before: Scores, after: Scores, units: JackknifeUnits | None = None) -> Replicates:
    """Return the PDIS estimate of ΔH, (2,) nats per token and per sequence, with its values without each unit.

    Args:
        before: Scores under the policy that sampled the sequences.
        after: Scores of the same tokens under the other policy.
        units: Jackknife units. None: each sequence is one. If they are spread over ranks, the function is collective
            (a few sums per position), and the ranks' tables must have the same width.

    Example: a = "x." and b = ".", h = 1 everywhere before the step, h' = 2 at the first tokens and 4 after "x". The
    step makes "x" 1.5 times as likely and "." at the start half as likely, so that at k = 1 ρ_a = 1.5, and b has ended
    with ρ_b = 0.5. H' = 2 + 1.5·4/(1.5 + 0.5) = 5 and T' = 1 + 1.5/2 = 1.75: ΔH_seq = 5 − 1.5, ΔH_tok = 5/1.75 − 1.
    """
    units = units or JackknifeUnits.of_rows(before.mask)
    exact_before = _exact(before, units)
    exact_after = _exact(after, units)
    log_ratios = sums_before(exact_after.logps - exact_before.logps)
    # Ratios are relative to the largest at each position, which cancels: none overflows, and not all underflow.
    ratios = (log_ratios - units.max(log_ratios)).exp()
    terms = torch.stack([ratios * exact_after.entropies, ratios * exact_before.mask, ratios], dim=1)  # (B, 3, T)
    total = units.reduce(terms.sum(dim=0))
    local_units, unit_sums = units.local(terms)

    def sum_of_positions(sums: Tensor) -> Tensor:
        return (sums[..., :2, :] / sums[..., 2:, :]).sum(dim=-1)

    without = total.new_zeros(units.count, 2)
    without[local_units] = sum_of_positions(total - unit_sums)
    changed = Replicates(sum_of_positions(total), units.reduce(without))  # each row is 0 on all ranks but one
    return _per_token_and_sequence(changed) - mean_entropy(before, units)


def mean_entropy(scores: Scores, units: JackknifeUnits | None = None) -> Replicates:
    """Return H of the policy that sampled the sequences, (2,) nats per token and per sequence."""
    units = units or JackknifeUnits.of_rows(scores.mask)
    exact = _exact(scores, units)
    sums = _sums(torch.stack([exact.entropies, exact.mask], dim=1).sum(dim=2), units)
    return _per_token_and_sequence(_ratio(sums, _sums(torch.ones_like(exact.mask[:, :1]), units)))


def first_order_change(
    scores: Scores, logp_slopes: Tensor, entropy_slopes: Tensor, units: JackknifeUnits | None = None
) -> Replicates:
    """Return X·δθ, (2,) nats per token and per sequence, with its values without each unit.

    The value equals the product of δθ with the gradient from `surrogate_weights(baseline="buffer")`, but needs no
    backward. Leaving out a unit also removes it from the baseline, from H_tok and from the mean length.

    Args:
        scores: Scores of the sequences.
        logp_slopes: ∂log π(t_ik)·δθ, from `slopes`, (N, T).
        entropy_slopes: ∂h_ik·δθ, from `slopes`, (N, T).
        units: Jackknife units. None: each sequence is one.
    """
    units = units or JackknifeUnits.of_rows(scores.mask)
    exact = _exact(scores, units)
    along = Scores(logp_slopes, entropy_slopes, scores.mask).exact()
    mask = exact.mask
    entropy = exact.entropies
    logp_terms = along.logps
    entropy_terms = along.entropies
    count = _sums(torch.ones_like(mask[:, :1]), units)
    lengths, entropies, direct = (
        _ratio(_sums(values.sum(dim=1, keepdim=True), units), count) for values in (mask, entropy, entropy_terms)
    )
    through_prefixes, length_change = (
        _ratio(_centred_products(sums_after(cost), logp_terms, mask, units), count) for cost in (entropy, mask)
    )
    change = direct + through_prefixes

    def combine(change: Tensor, length_change: Tensor, entropy: Tensor, length: Tensor) -> Tensor:
        return torch.cat([(change - entropy / length * length_change) / length, change], dim=-1)

    parts = (change, length_change, entropies, lengths)
    return Replicates(combine(*(p.value for p in parts)), combine(*(p.without for p in parts)))


def slopes(ahead: Scores, behind: Scores, size: float) -> tuple[Tensor, Tensor]:
    """Return (∂log π·δθ, ∂h·δθ), (N, T) each, by central differences between θ ± size·δθ. The error is O(size²)."""
    return (
        (ahead.logps.double() - behind.logps.double()) / (2.0 * size),
        (ahead.entropies.double() - behind.entropies.double()) / (2.0 * size),
    )


def _exact(scores: Scores, units: JackknifeUnits) -> Scores:
    if units.count < MIN_SEQUENCES:
        raise UserError(f"{units.count} independent sequences: an error bar needs at least {MIN_SEQUENCES}")
    return scores.exact()


def _per_token_and_sequence(entropy_and_length: Replicates) -> Replicates:
    """Return (H/T, H), given (H, T)."""

    def ratio(values: Tensor) -> Tensor:
        return torch.stack([values[..., 0] / values[..., 1], values[..., 0]], dim=-1)

    return Replicates(ratio(entropy_and_length.value), ratio(entropy_and_length.without))


def _sums(values: Tensor, units: JackknifeUnits) -> Replicates:
    """Return the sum of (N, …) values over all sequences, with the sums without each unit."""
    by_unit = units.gather(values)
    total = by_unit.sum(dim=0)
    return Replicates(total, total - by_unit)


def _ratio(sums: Replicates, counts: Replicates) -> Replicates:
    return Replicates(sums.value / counts.value, sums.without / counts.without)


def _centred_products(values: Tensor, slopes: Tensor, alive: Tensor, units: JackknifeUnits) -> Replicates:
    """Return Σ_ik (v_ik − loo_k) d_ik, (1,), with its values without each unit.

    loo_k is the mean of v over the other sequences alive at k. A position with n live sequences contributes
    (n Σ v d − Σ v Σ d) / (n − 1), or v d if n = 1.
    """
    values = values * alive

    def centred(product: Tensor, value: Tensor, slope: Tensor, count: Tensor) -> Tensor:
        count_others = (count - 1.0).clamp(min=1.0)
        return torch.where(count > 1, (count * product - value * slope) / count_others, product).sum(
            dim=-1, keepdim=True
        )

    sums = [_sums(column, units) for column in (values * slopes, values, slopes, alive)]
    return Replicates(centred(*(s.value for s in sums)), centred(*(s.without for s in sums)))

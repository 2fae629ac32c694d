"""The effect of a step on the entropy of fresh responses: a sample E, drawn at θ, that the step was not trained on.

    predicted   X_E · δθ = Σ_b x_b · δθ,   x_b = Σ_{i in block b} Σ_k (w_ik ∂log π(t_ik) + u_ik ∂h_ik) / N
    measured    ΔH from θ to θ' by per-decision importance sampling (entropy/per_decision.py), and for comparison by
                the weights of whole sequences (importance.py), which is noisier
    floor       what rounding alone would measure: δθ = 0, between two scorings that put E's sequences into different
                batches. A prediction below the floor cannot be compared with the measurement

w and u are the weights of entropy/weights.py with the baseline "buffer", over all of E. E is independent of the
update's batch, so no fold has to be left out. Prediction and measurement use the same E and share its noise: most of it
cancels in their difference, block by block, and the second order of the step remains.

Importance weights can be trusted only while θ' is close to θ. If their effective sample size is below MIN_ESS_SHARE·N,
E is drawn again at θ' with common random numbers, and ΔH is the difference between the two samples, with errors from
pairs.

Tables of scores have a row for each sequence, of this rank or of all ranks: JackknifeUnits say which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.entropy.per_decision import per_decision_change
from rl_training.entropy.weights import Target, surrogate_weights
from rl_training.policy.policy import Policy
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.probes.importance import (
    LOGP,
    MIN_ESS_SHARE,
    WeightStatistics,
    importance_weights,
    paired_replicates,
    reweighted_replicates,
    sequence_totals,
)
from rl_training.statistics.jackknife import JackknifeUnits, Replicates
from rl_training.step.loss_weights import LossWeights

TARGETS: tuple[Target, ...] = ("token", "sequence")
MIN_BLOCKS = 32  # for an error bar; to reach it, blocks are made smaller than a microbatch


@dataclass(frozen=True)
class EvaluationBuffer:
    """E: this rank's sequences, and the scores at θ of this rank's or of all ranks' sequences."""

    rollout: Rollout  # of this rank
    score_rows: Tensor  # (B,): for each sequence of the rollout, its row in `scores`
    scores: Scores  # equally wide on every rank
    sequences: JackknifeUnits  # each sequence is a unit
    units: JackknifeUnits  # independent units: sequences, or prompts with several responses each

    @property
    def num_sequences(self) -> int:
        """N, the number of sequences over all ranks."""
        return self.sequences.count

    def blocks(self, microbatch_size: int) -> JackknifeUnits:
        """Join neighbouring units into blocks that hold at most `microbatch_size` sequences."""
        units_per_microbatch = microbatch_size * self.units.count // self.num_sequences
        return self.units.in_blocks(max(1, min(units_per_microbatch, self.units.count // MIN_BLOCKS)))


# --- predicted --------------------------------------------------------------------------------------------------------


def weights_of_buffer(buffer: EvaluationBuffer, targets: Sequence[Target]) -> list[LossWeights]:
    """Return w and u of this rank's sequences, in the rollout's order, for each target. Collective."""
    scores = buffer.scores
    sequences = buffer.sequences
    entropies = scores.entropies.double()
    weights = []
    for target in targets:
        tables = surrogate_weights(entropies, scores.mask, sequences.number, target, "buffer", sequences.reduce)
        weights.append(LossWeights(*(part[buffer.score_rows] for part in tables)))
    return weights


def without_blocks(products: Tensor, mask: Tensor, blocks: JackknifeUnits) -> Replicates:
    """Sum products, (blocks, …, targets), over all blocks, and without each block, scaled up to all of E.

    A sum without a block is divided by the remaining share of E's tokens (per token) or sequences (per sequence). The
    H_tok and the baseline inside the weights are treated as constants.
    """
    lengths = mask.double().sum(dim=1)
    sizes = blocks.gather(torch.stack([lengths, torch.ones_like(lengths)], dim=1))  # (blocks, 2): tokens, sequences
    shares_left = (1.0 - sizes / sizes.sum(dim=0))[:, : products.shape[-1]]
    total = products.sum(dim=0)
    return Replicates(total, (total - products) / shares_left.view(len(shares_left), *(1,) * (total.dim() - 1), -1))


# --- measured ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredChange:
    """The measured change of entropy on E from θ to θ'. Replicates are (2,): nats per token and per sequence."""

    before: Scores  # at θ
    after: Scores  # at θ', of the same tokens
    units: JackknifeUnits  # independent units
    fresh: Tensor | None  # (N, 3), totals of responses drawn at θ'; None if importance weights are trusted
    true: Replicates  # by per-decision importance sampling, or from paired samples if E was drawn again
    snis: Replicates  # by importance weights of whole sequences
    weights: WeightStatistics  # statistics of the weights behind `snis`
    log_ratios: Tensor  # (N,), log π'(t)/π(t) of whole sequences

    @property
    def is_resampled(self) -> bool:
        """Whether `true` compares E with responses that were drawn again at θ'."""
        return self.fresh is not None


def measure_change(buffer: EvaluationBuffer, after: Scores, resample: Callable[[], Tensor]) -> MeasuredChange:
    """Measure the change of entropy on E. Collective.

    Args:
        buffer: E.
        after: Scores of E's tokens at θ', with the same rows and width as the buffer's.
        resample: Returns the totals, (N, 3), of responses drawn at θ' with E's prompts and random numbers. Either
            all ranks call it or none does.
    """
    weights = importance_weights(*(_totals(scores, buffer.sequences) for scores in (buffer.scores, after)))
    is_trusted = not weights.ess < MIN_ESS_SHARE * buffer.num_sequences  # a nan ESS counts as trusted
    fresh = None if is_trusted else resample()
    return change_between(buffer.scores, after, buffer.sequences, buffer.units, fresh)


def change_between(
    before: Scores, after: Scores, sequences: JackknifeUnits, units: JackknifeUnits, fresh: Tensor | None
) -> MeasuredChange:
    """Measure the change of entropy between two scorings of the same sequences. Collective."""
    totals_before, totals_after = (_totals(scores, sequences) for scores in (before, after))
    return MeasuredChange(
        before, after, units, fresh,
        true=true_change(before, after, sequences, units, fresh),
        snis=reweighted_replicates(totals_before, totals_after, _global_units(units, sequences)),
        weights=importance_weights(totals_before, totals_after),
        log_ratios=(totals_after - totals_before)[:, LOGP],
    )  # fmt: skip


def true_change(
    before: Scores, after: Scores, sequences: JackknifeUnits, units: JackknifeUnits, fresh: Tensor | None
) -> Replicates:
    """Return ΔH by per-decision importance sampling, or from paired samples if E was drawn again. Collective."""
    if fresh is None:
        return per_decision_change(before, after, units)
    return paired_replicates(_totals(before, sequences), fresh, _global_units(units, sequences))


def _totals(scores: Scores, sequences: JackknifeUnits) -> Tensor:
    """Return `sequence_totals` of the sequences of all ranks, (N, 3). Collective."""
    return sequences.gather(sequence_totals(scores))


def _global_units(units: JackknifeUnits, sequences: JackknifeUnits) -> JackknifeUnits:
    """Return units over the sequences of all ranks, for tables that every rank holds whole. Collective."""
    return JackknifeUnits(sequences.gather(units.number.double()).long(), units.count)


def score_in_other_batches(policy: Policy, rollout: Rollout) -> Scores:
    """Score all rows again, batched by similar length instead, for the rounding floor."""
    order = rollout.completion_mask.sum(dim=1).argsort(stable=True)
    batches = [rows for half in order.chunk(2) for rows in policy.batches_of(half)]
    scores, rank = policy.score_rollout(rollout, batches=batches), order.argsort()
    return Scores(scores.logps[rank], scores.entropies[rank], scores.mask[rank])

"""The effect of a step on the entropy of fresh responses: E, sampled at θ, from which the step has not learned.

    predicted   X_E · δθ = Σ_b x_b · δθ,   x_b = Σ_{i in block b} Σ_k (w_ik ∂log π(t_ik) + u_ik ∂h_ik) / N
    measured    ΔH from θ to θ' by per-decision importance sampling (per_decision.py); by the weights of whole sequences
                (importance.py), which is noisier, beside it
    floor       what rounding alone would measure: δθ = 0, between two scorings that put E's sequences into different
                batches. A prediction below it cannot be compared with what is measured

w and u are the weights of entropy.py with the baseline "buffer", over all of E. E is independent of the update's batch,
so no fold has to be left out. Prediction and measurement on one E share their noise: in their difference, block by
block, most of it cancels, and the curvature of the step is left.

Importance weights can be trusted while θ' is near: with an effective sample size below MIN_ESS_SHARE·N, E is drawn
afresh at θ' with common random numbers, and ΔH is the difference of the two samples, pair by pair.

Tables of scores have a row for each sequence of this process, or of all of them: JackknifeUnits say which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.entropy.importance import (
    LOGP,
    MIN_ESS_SHARE,
    Weights,
    importance_weights,
    paired_replicates,
    reweighted_replicates,
    sequence_totals,
)
from rl_training.entropy.per_decision import per_decision_change
from rl_training.entropy.weights import Target, surrogate_weights
from rl_training.gradients.loss_weights import LossWeights
from rl_training.policy.policy import Policy
from rl_training.policy.rollout import Rollout, take_rows
from rl_training.policy.scores import Scores
from rl_training.statistics.jackknife import JackknifeUnits, Replicates

TARGETS: tuple[Target, ...] = ("token", "sequence")
MOST_BLOCKS = 32  # enough blocks for an error; small microbatches are joined to reach it


@dataclass(frozen=True)
class EvaluationBuffer:
    """E: this process's sequences, and the scores at θ of these or of all processes' sequences."""

    rollout: Rollout  # of this process
    number: Tensor  # (B,), the row of `scores` of each sequence in the rollout
    scores: Scores  # of the same width on every process
    sequences: JackknifeUnits  # each sequence is a unit
    units: JackknifeUnits  # independent units: sequences, or prompts with several responses each

    @property
    def num_sequences(self) -> int:
        """N, the number of sequences over all processes."""
        return self.sequences.count

    def blocks(self, microbatch_size: int) -> JackknifeUnits:
        """Join neighbouring units into blocks of at most a microbatch's sequences."""
        fitting = microbatch_size * self.units.count // self.num_sequences
        return self.units.in_blocks(max(1, min(fitting, self.units.count // MOST_BLOCKS)))


# --- predicted --------------------------------------------------------------------------------------------------------


def weights_of_buffer(buffer: EvaluationBuffer, targets: Sequence[Target]) -> list[LossWeights]:
    """Return w and u of this process's sequences, in the rollout's order, for each target. A collective."""
    scores = buffer.scores
    sequences = buffer.sequences
    entropies = scores.entropies.double()
    weights = []
    for target in targets:
        tables = surrogate_weights(entropies, scores.mask, sequences.number, target, "buffer", sequences.reduce)
        weights.append(LossWeights(*(part[buffer.number] for part in tables)))
    return weights


def without_blocks(products: Tensor, mask: Tensor, blocks: JackknifeUnits) -> Replicates:
    """Sum (blocks, …, targets) products over blocks, with the sums without each block, scaled up to all of E.

    A sum without a block is divided by the remaining share of E's tokens (per token) or sequences (per sequence). The
    level H_tok inside the weights and their baseline are taken as given.
    """
    lengths = mask.double().sum(dim=1)
    sizes = blocks.gather(torch.stack([lengths, torch.ones_like(lengths)], dim=1))  # (blocks, 2): tokens, sequences
    shares_left = (1.0 - sizes / sizes.sum(dim=0))[:, : products.shape[-1]]
    total = products.sum(dim=0)
    return Replicates(total, (total - products) / shares_left.view(len(shares_left), *(1,) * (total.dim() - 1), -1))


# --- measured ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredChange:
    """The measured change of entropy on E from θ to θ'. Replicates are (2,), nats per token and per sequence."""

    before: Scores  # at θ
    after: Scores  # of the same tokens, at θ'
    sequences: JackknifeUnits  # each sequence is a unit
    units: JackknifeUnits  # independent units
    fresh: Tensor | None  # (N, 3), totals of responses drawn afresh at θ'; None where importance weights are trusted
    true: Replicates  # by per-decision importance sampling, or pair by pair where E was drawn afresh
    snis: Replicates  # by importance weights of whole sequences
    weights: Weights  # statistics of these weights
    log_ratios: Tensor  # (N,), log π'(t)/π(t) of whole sequences

    @property
    def resampled(self) -> bool:
        """Whether `true` compares with responses that were drawn afresh."""
        return self.fresh is not None


def measure_change(buffer: EvaluationBuffer, after: Scores, draw_afresh: Callable[[], Tensor]) -> MeasuredChange:
    """Measure the change of entropy on E. A collective.

    Args:
        buffer: E.
        after: scores of E's tokens at θ', with the buffer's rows and width.
        draw_afresh: returns the totals, (N, 3), of fresh responses at θ' with E's prompts and random numbers. All
            processes call it, or none does.
    """
    weights = importance_weights(*(_totals(scores, buffer.sequences) for scores in (buffer.scores, after)))
    trusted = not weights.ess < MIN_ESS_SHARE * buffer.num_sequences  # also where it is nan
    fresh = None if trusted else draw_afresh()
    return change_between(buffer.scores, after, buffer.sequences, buffer.units, fresh)


def change_between(
    before: Scores, after: Scores, sequences: JackknifeUnits, units: JackknifeUnits, fresh: Tensor | None
) -> MeasuredChange:
    """Measure the change of entropy between two scorings of the same sequences. A collective."""
    then, now = (_totals(scores, sequences) for scores in (before, after))
    return MeasuredChange(
        before, after, sequences, units, fresh,
        true=true_change(before, after, sequences, units, fresh),
        snis=reweighted_replicates(then, now, _global_units(units, sequences)),
        weights=importance_weights(then, now),
        log_ratios=(now - then)[:, LOGP],
    )  # fmt: skip


def true_change(
    before: Scores, after: Scores, sequences: JackknifeUnits, units: JackknifeUnits, fresh: Tensor | None
) -> Replicates:
    """Return ΔH by per-decision importance sampling, or pair by pair where E was drawn afresh. A collective."""
    if fresh is None:
        return per_decision_change(before, after, units)
    return paired_replicates(_totals(before, sequences), fresh, _global_units(units, sequences))


def _totals(scores: Scores, sequences: JackknifeUnits) -> Tensor:
    """Return `sequence_totals` of the sequences of all processes, (N, 3). A collective."""
    return sequences.gather(sequence_totals(scores))


def _global_units(units: JackknifeUnits, sequences: JackknifeUnits) -> JackknifeUnits:
    """Return the units of the sequences of all processes, for tables that every process holds. A collective."""
    return JackknifeUnits(sequences.gather(units.number.double()).long(), units.count)


def score_in_other_batches(policy: Policy, rollout: Rollout) -> Scores:
    """Score all rows once more, batched with others of about their length, for the rounding floor."""
    order = rollout.completion_mask.sum(dim=1).argsort(stable=True)
    parts = [policy.score_rollout(take_rows(rollout, rows)) for rows in order.chunk(2)]
    table = torch.cat([torch.stack([part.logps, part.entropies]) for part in parts], dim=1)
    logps, entropies = table[:, order.argsort()]
    return Scores(logps, entropies, rollout.completion_mask)

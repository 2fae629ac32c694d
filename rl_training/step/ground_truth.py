"""The entropy change across a real optimizer step, measured on sequences that training never sees.

The training batch is no ground truth: it shares its noise with the update that it made. So, around a step from θ to θ',

    draw      an evaluation buffer E of N fresh responses to random prompts, sampled and scored at θ
    predict   X_E · δθ: the first order from E itself (evaluation_gradient.py), where the step's δθ is known before it
    measure   E scored at θ', and ΔH by per-decision importance sampling (per_decision.py); by the weights of whole
              sequences (importance.py), which is noisier, beside it

Prediction and truth of one E share their noise: `delta_h/evaluation_error`, their difference block by block, has little
of it left. It is the curvature of the step.

The weights can be trusted while θ' is near: with ESS < MIN_ESS_SHARE·N, E is drawn afresh at θ' with the same random
numbers, and ΔH is the difference of the two samples, pair by pair. Which it was says `delta_h/true_resampled`.

What rounding alone makes of it is `delta_h/true_floor`: the same computation with δθ = 0, between two scorings of E at
θ that put its sequences into different batches. A prediction below it cannot be held against the truth.

Cost: N responses generated and three forward passes over them, two more of each where E is drawn afresh; a forward pass
and a backward more for the prediction. Ranks exchange sums for each position, never the scores of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.mathematics.entropy import Estimator, Target
from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR, Estimate
from rl_training.mathematics.importance import (
    MIN_ESS_SHARE,
    MIN_SEQUENCES,
    EntropyChange,
    change_terms,
    importance_weights,
    replicates_of_terms,
    reweighted_change,
    sequence_totals,
)
from rl_training.mathematics.jackknife import Replicates
from rl_training.mathematics.per_decision import per_decision_change
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.units import Units
from rl_training.mathematics.vectors import FlatVectors
from rl_training.step.evaluation_gradient import blocks_of, evaluation_change
from rl_training.step.rollout import Rollout, in_one_width, take_rows
from rl_training.step.types import StepContext

NO_ERROR_BAR = "no error bar: it describes the evaluation buffer and estimates nothing beyond it"
NOT_FINITE = "a log-probability or an entropy of the evaluation buffer is not a finite number"
OVERFLOW = "the step changed a sequence's probability by more than float64 can hold"
TARGETS: tuple[Target, ...] = ("token", "sequence")
SUFFIXES = ("", "_sequence")
PREDICTED = ("delta_h/evaluation", "delta_h/evaluation_error")
MEASURED = (
    *("delta_h/true", "delta_h/true_sequence", "delta_h/true_snis", "delta_h/true_floor", "delta_h/true_resampled"),
    *("delta_h/ess", "delta_h/weight_max", "delta_h/weight_min"),
)


@dataclass(frozen=True)
class EvaluationBuffer:
    """E: this rank's sequences, and what the policy says of them at θ."""

    rollout: Rollout
    sequences: Units  # each a unit of its own, over all ranks
    totals: Tensor  # (N, 3), `sequence_totals` of all ranks
    scores: Scores  # (B, T), as wide on every rank
    again: Scores  # the same from other batches


class GroundTruth:
    """Measures the true change of entropy over each `every`-th optimizer step. See the module's docstring.

    every          measure each `every`-th step, the first one included, as probes do
    num_sequences  N, over all ranks; the error falls as 1/√N
    seed           of the evaluation buffers. Step s of a run has its own, whether the run was resumed or not

    Call `draw` before the optimizer step and `measure` after it, on every rank.
    """

    def __init__(self, every: int = 1, num_sequences: int = 512, seed: int = 0) -> None:
        if every < 1:
            raise ValueError(f"ground truth: every={every} must be at least 1 (measure each `every`-th step)")
        if num_sequences < MIN_SEQUENCES:
            raise ValueError(f"ground truth: num_sequences={num_sequences} must be at least {MIN_SEQUENCES}")
        if seed < 0:
            raise ValueError(f"ground truth: seed={seed} must not be negative")
        self.every = every
        self.num_sequences = num_sequences
        self.seed = seed
        self._buffer: EvaluationBuffer | None = None
        self._predicted: tuple[Replicates, Units] | None = None
        self._no_prediction: dict[str, Estimate] = {}

    def measures_at(self, step: int) -> bool:
        """Returns whether the truth is measured at this optimizer step, counted from 1."""
        return (step - 1) % self.every == 0

    def draw(self, ctx: StepContext) -> None:
        """Samples and scores the evaluation buffer at the present parameters, if this step is measured."""
        if not self.measures_at(ctx.step):
            return
        rollout = ctx.policy.sample(self.num_sequences, self._seed_of(ctx.step))
        sequences = Units(rollout.prompt_index, self.num_sequences, ctx.reduce)
        scores = ctx.policy.score_rollout(rollout)
        totals = sequences.gather(sequence_totals(scores))
        width = int(sequences.gather(rollout.token_mask.sum(dim=1).double()).max())
        again = _widened(_scored_by_length(ctx, rollout), width)
        self._buffer = EvaluationBuffer(rollout, sequences, totals, _widened(scores, width), again)
        self._predicted, self._no_prediction = None, {}

    def predict(
        self, ctx: StepContext, update: Tensor, layout: FlatVectors, estimator: Estimator, per_sequence: bool
    ) -> None:
        """Predicts what this δθ, (P,), flat as `layout` has it, does to E's entropy, if this step is measured."""
        if not self.measures_at(ctx.step):
            return
        targets = TARGETS[: 1 + per_sequence]
        if ctx.optimizer.states is None:
            missing = Estimate.missing(ctx.optimizer.reason)
            self._no_prediction = {
                f"{name}{suffix}": missing for name in PREDICTED for suffix in SUFFIXES[: len(targets)]
            }
            return
        buffer = self._drawn()
        blocks = blocks_of(ctx, buffer.rollout, self.num_sequences)
        change = evaluation_change(ctx, buffer.rollout, buffer.scores, blocks, update, layout, estimator, targets)
        self._predicted = change, blocks

    def measure(self, ctx: StepContext) -> dict[str, Estimate]:
        """Returns the change of entropy since `draw`, and how it is known; nothing if this step is not measured."""
        if not self.measures_at(ctx.step):
            return {}
        buffer = self._drawn()
        after = ctx.policy.score_rollout(buffer.rollout)
        totals = buffer.sequences.gather(sequence_totals(after))
        after = _widened(after, buffer.scores.mask.shape[1])
        weights = importance_weights(buffer.totals, totals)
        resampled = weights.ess < MIN_ESS_SHARE * self.num_sequences  # the same on every rank; not where it is nan
        fresh = self._fresh_totals(ctx) if resampled else None

        def true_change(units: Units) -> Replicates:
            if fresh is None:
                return per_decision_change(buffer.scores, after, units)
            pairs = change_terms(buffer.totals, fresh, torch.ones_like(fresh[:, 0]))
            return replicates_of_terms(units.gather(pairs[buffer.rollout.prompt_index]))

        change = EntropyChange.of(true_change(buffer.sequences))
        snis = reweighted_change(buffer.totals, totals)
        floor = per_decision_change(buffer.scores, buffer.again, buffer.sequences)
        measured = (
            self._known(change.token, change.token_stderr),
            self._known(change.sequence, change.sequence_stderr),
            self._known(snis.token, snis.token_stderr),
            self._known(float(floor.value[0])),
            self._known(float(resampled)),
            self._known(weights.ess),
            self._known(weights.largest),
            self._known(weights.smallest),
        )
        answers = self._no_prediction | dict(zip(MEASURED, measured, strict=True))
        if self._predicted is not None:
            predicted, blocks = self._predicted
            answers |= _compared(predicted, true_change(blocks))
        self._buffer = self._predicted = None
        return answers

    def _drawn(self) -> EvaluationBuffer:
        assert self._buffer is not None, "draw(ctx) comes before the optimizer step"
        return self._buffer

    def _fresh_totals(self, ctx: StepContext) -> Tensor:
        """Returns (N, 3) totals of responses drawn and scored at the present parameters, with the same dice."""
        fresh = ctx.policy.sample(self.num_sequences, self._seed_of(ctx.step))
        sequences = Units(fresh.prompt_index, self.num_sequences, ctx.reduce)
        return sequences.gather(sequence_totals(ctx.policy.score_rollout(fresh)))

    def _seed_of(self, step: int) -> int:
        return (self.seed << 32) + step

    def _known(self, value: float, stderr: float = math.nan) -> Estimate:
        """Returns the estimate over all N sequences, nan with its reason when it is not a finite number."""
        if not math.isfinite(value):
            reason = OVERFLOW if math.isinf(value) else NOT_FINITE
            return Estimate(math.nan, num_samples=self.num_sequences, reason=reason)
        return Estimate(value, stderr, self.num_sequences, NO_ERROR_BAR if math.isnan(stderr) else "")


def _compared(predicted: Replicates, true: Replicates) -> dict[str, Estimate]:
    """Returns the prediction from E, per token and as far as asked for per sequence, and how far it is off."""
    error = predicted - Replicates(true.value[: len(predicted.value)], true.without[:, : len(predicted.value)])
    answers = {}
    for name, replicates in zip(PREDICTED, (predicted, error), strict=True):
        for suffix, value, stderr in zip(SUFFIXES, replicates.value, replicates.stderr, strict=False):
            answers[f"{name}{suffix}"] = _of_blocks(float(value), float(stderr), len(replicates.without))
    return answers


def _of_blocks(value: float, stderr: float, num_blocks: int) -> Estimate:
    if not math.isfinite(value):
        return Estimate(math.nan, num_samples=num_blocks, reason=NOT_FINITE)
    if num_blocks < MIN_FOLDS_FOR_STDERR:
        reason = f"{num_blocks} blocks of sequences: an error bar needs {MIN_FOLDS_FOR_STDERR}"
        return Estimate(value, num_samples=num_blocks, reason=reason)
    return Estimate(value, stderr, num_blocks)


def _scored_by_length(ctx: StepContext, rollout: Rollout) -> Scores:
    """Returns the scores of all rows once more, each in a batch with others of about its length."""
    order = rollout.completion_mask.sum(dim=1).argsort(stable=True)
    parts = [ctx.policy.score_rollout(take_rows(rollout, rows)) for rows in order.chunk(2)]
    back = order.argsort()

    def join(values: list[Tensor]) -> Tensor:
        return torch.cat(values)[back]

    return Scores(
        logps=join([part.logps for part in parts]),
        entropies=join([part.entropies for part in parts]),
        mask=rollout.completion_mask,
    )


def _widened(scores: Scores, width: int) -> Scores:
    """Returns the scores in tables of so many columns."""

    logps, entropies, mask = (in_one_width([v], at_least=width) for v in (scores.logps, scores.entropies, scores.mask))
    return Scores(logps, entropies, mask)

"""The ground truth probe: the entropy change across a real optimizer step, on sequences that training never sees.

The training batch cannot be the ground truth, because it shares its noise with the update it made. So, around a step
from θ to θ',

    before    an evaluation buffer E of N fresh responses to random prompts is sampled and scored at θ. If δθ has a
              formula, E itself gives a first-order prediction, X_E · δθ
    after     E is scored at θ', and ΔH is measured

probes/fresh_sample.py has the formulas. `delta_h/evaluation_error` is prediction minus truth on the same E: the
curvature of the step. `delta_h/true_resampled` says whether E had to be sampled again at θ'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.engine.probe import Probe, Reading
from rl_training.entropy.per_decision import MIN_SEQUENCES, per_decision_change
from rl_training.errors import UserError
from rl_training.options import check_whole
from rl_training.parallel.vectors import Vector, dot
from rl_training.policy.rollout import Rollout, pad_and_concat
from rl_training.policy.scores import Scores
from rl_training.probes import importance
from rl_training.probes.fresh_sample import (
    TARGETS,
    EvaluationBuffer,
    measure_change,
    score_in_other_batches,
    true_change,
    weights_of_buffer,
    without_blocks,
)
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.jackknife import MIN_UNITS_OFFLINE, JackknifeUnits, Replicates
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.needs import Need

NO_ERROR_BAR = "no error bar: it describes the evaluation buffer and estimates nothing beyond it"
NOT_FINITE = Unavailable(
    "not_finite_evaluation", "a log-probability or an entropy of the evaluation buffer is not a finite number"
)
OVERFLOW = Unavailable("overflow", "the step changed a sequence's probability by more than float64 can hold")
FEW_BLOCKS = Unavailable("few_blocks", "{count} blocks of sequences: an error bar needs {least}")
MAX_SEQUENCES = 65536
SUFFIXES = ("", "_sequence")
PREDICTED = ("delta_h/evaluation", "delta_h/evaluation_error")
MEASURED = (
    *("delta_h/true", "delta_h/true_sequence", "delta_h/true_snis", "delta_h/true_floor", "delta_h/true_resampled"),
    *("delta_h/ess", "delta_h/weight_max", "delta_h/weight_min"),
)


@dataclass(frozen=True)
class BufferReading(Reading):
    """The reading before the step, with the evaluation buffer and its prediction."""

    buffer: EvaluationBuffer | None = None
    floor: float = math.nan  # what rounding alone would measure, nats per token
    prediction: tuple[Replicates, JackknifeUnits] | None = None  # with the blocks of its jackknife


class GroundTruthProbe(Probe):
    """Measures the true change of entropy over each `every`-th optimizer step. See the module's docstring.

    Args:
        every: Measure each `every`-th step, starting with the first.
        sequences: Fresh responses, over all ranks. The error falls as 1/√sequences.
        seed: Seed of the fresh responses. Each step draws its own, the same ones if the run is resumed.
    """

    name = "ground_truth"
    needs = Need.ENTROPY_CHANGE

    def __init__(self, every: int = 10, sequences: int = 512, seed: int = 0) -> None:
        super().__init__(every)
        check_whole("ground_truth: sequences", sequences, MIN_SEQUENCES)
        if sequences > MAX_SEQUENCES:
            raise UserError(f"ground_truth: sequences={sequences} takes hours per step: use at most {MAX_SEQUENCES}")
        check_whole("ground_truth: seed", seed, 0)
        self.sequences, self.seed = sequences, seed

    def measure(self, ctx: StepContext, state: Any) -> BufferReading:
        step = ctx.step
        no_truth = ctx.reasons.no_fresh_responses
        num_targets = 1 + ctx.prediction.settings.per_sequence
        reason = no_truth or ctx.prediction.reason or step.optimizer.reason
        names = [f"{name}{suffix}" for name in PREDICTED for suffix in SUFFIXES[:num_targets]]
        missing = dict.fromkeys(names, Estimate.missing(reason or "not measured yet"))
        if no_truth:
            return BufferReading(missing)
        buffer, floor = self._draw(ctx)
        if reason:
            return BufferReading(missing, buffer=buffer, floor=floor)
        blocks = buffer.blocks(len(step.batch.microbatch_rows[0]))
        prediction = predicted_change(ctx, buffer, blocks, num_targets), blocks
        return BufferReading(missing, buffer=buffer, floor=floor, prediction=prediction)

    def after_step(self, ctx: StepContext, reading: Reading) -> Reading:
        assert isinstance(reading, BufferReading)
        if reading.buffer is None:
            no_truth = ctx.reasons.no_fresh_responses
            assert no_truth is not None
            return Reading(reading.predicted, dict.fromkeys(MEASURED, Estimate.missing(no_truth)))
        return self._measured(ctx, reading, reading.buffer)

    def _sample(self, ctx: StepContext) -> tuple[Rollout, JackknifeUnits]:
        """Return N responses at the current parameters, each a jackknife unit. A step's calls share random numbers."""
        rollout = ctx.policy.sample(self.sequences, (self.seed << 32) + ctx.step.number)
        return rollout, JackknifeUnits(rollout.prompt_index, self.sequences, ctx.ranks.reduce)

    def _draw(self, ctx: StepContext) -> tuple[EvaluationBuffer, float]:
        """Return the evaluation buffer, sampled and scored at the current parameters, and its rounding floor."""
        rollout, sequences = self._sample(ctx)
        scores = ctx.policy.score_rollout(rollout)
        width = int(sequences.gather(rollout.token_mask.sum(dim=1).double()).max())
        score_rows = torch.arange(rollout.num_sequences, device=sequences.number.device)
        buffer = EvaluationBuffer(rollout, score_rows, _padded(scores, width), sequences, sequences)
        rescored = _padded(score_in_other_batches(ctx.policy, rollout), width)
        return buffer, float(per_decision_change(buffer.scores, rescored, sequences).value[0])

    def _measured(self, ctx: StepContext, reading: BufferReading, buffer: EvaluationBuffer) -> Reading:
        """Return the reading after the step: the change of entropy since the buffer was drawn, and its diagnostics."""

        def resample() -> Tensor:
            rollout, sequences = self._sample(ctx)
            return sequences.gather(importance.sequence_totals(ctx.policy.score_rollout(rollout)))

        after = _padded(ctx.policy.score_rollout(buffer.rollout), buffer.scores.mask.shape[1])
        change = measure_change(buffer, after, resample)
        true, snis, weights = change.true, change.snis, change.weights
        values_without_error = reading.floor, change.is_resampled, weights.ess, weights.largest, weights.smallest
        values = [*true.value, snis.value[0], *values_without_error]
        stderrs = [*true.stderr, snis.stderr[0], *(math.nan for _ in values_without_error)]
        measured = {
            name: _estimate(float(value), float(stderr), self.sequences)
            for name, value, stderr in zip(MEASURED, values, stderrs, strict=True)
        }
        if reading.prediction is None:
            return Reading(reading.predicted, measured)
        prediction, blocks = reading.prediction
        true = true_change(buffer.scores, after, buffer.sequences, blocks, change.fresh)
        return Reading(_prediction_and_error(prediction, true), measured)


def _prediction_and_error(predicted: Replicates, true: Replicates) -> dict[str, Estimate]:
    """Return the prediction from E and its error: per token and, if predicted, per sequence."""
    error = predicted - Replicates(true.value[: len(predicted.value)], true.without[:, : len(predicted.value)])
    count = len(predicted.without)
    enough = count >= MIN_UNITS_OFFLINE
    no_bar = NOT_FINITE if enough else FEW_BLOCKS.formatted(count=count, least=MIN_UNITS_OFFLINE)
    return {
        f"{name}{suffix}": _estimate(float(value), float(stderr) if enough else math.nan, count, no_bar)
        for name, replicates in zip(PREDICTED, (predicted, error), strict=True)
        for suffix, value, stderr in zip(SUFFIXES, replicates.value, replicates.stderr, strict=False)
    }


def _estimate(value: float, stderr: float, count: int, no_bar: str = NO_ERROR_BAR) -> Estimate:
    if not math.isfinite(value):
        return Estimate(math.nan, num_samples=count, reason=OVERFLOW if math.isinf(value) else NOT_FINITE)
    return Estimate(value, stderr, count, no_bar if math.isnan(stderr) else "")


def _padded(scores: Scores, width: int) -> Scores:
    """Return the scores padded to `width` columns."""
    logps, entropies, mask = (
        pad_and_concat([v], at_least=width) for v in (scores.logps, scores.entropies, scores.mask)
    )
    return Scores(logps, entropies, mask)


def predicted_change(
    ctx: StepContext, buffer: EvaluationBuffer, blocks: JackknifeUnits, num_targets: int
) -> Replicates:
    """Return X_E · δθ, (targets,) nats, and its values without each block, (blocks, targets). Collective.

    Args:
        ctx: The step.
        buffer: E.
        blocks: The units of the jackknife.
        num_targets: 1 for nats per token, 2 to add nats per sequence.
    """
    update, mask = ctx.prediction.update, buffer.scores.mask
    assert update is not None
    weights = weights_of_buffer(buffer, TARGETS[:num_targets])
    block = blocks.number[buffer.score_rows]
    local_blocks, ones = block.unique(), torch.ones(len(block), 1, device=mask.device)
    rows_per_pass = [(block == number).nonzero().squeeze(1) for number in local_blocks]
    products: list[Tensor] = []  # of each pass, (ranks, targets)

    def multiply(gradients: list[Vector]) -> None:
        products.append(torch.stack([dot(x, update) for x in gradients], dim=1))

    with ctx.policy.measuring():
        ctx.gradients_by_rank(rows_per_pass, weights, ones, multiply, buffer.rollout)
    table = torch.zeros(blocks.count, num_targets, dtype=torch.float64, device=mask.device)
    table[local_blocks] = ctx.ranks.reduce(torch.stack(products))[: len(local_blocks), ctx.ranks.number]
    return without_blocks(ctx.ranks.reduce(table) / buffer.num_sequences, mask, blocks)

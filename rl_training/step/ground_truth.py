"""The entropy change across a real optimizer step, measured on sequences that training never sees.

The training batch is no ground truth: it shares its noise with the update that it made. So, around a step from θ to θ',

    draw      an evaluation buffer E of N fresh responses to random prompts, sampled and scored at θ
    measure   E scored at θ', and ΔH by self-normalised importance sampling (importance.py)

The weights are worth something while θ' is near: with ESS < N/2, E is drawn afresh at θ' with the same random numbers,
and ΔH is the difference of the two samples, pair by pair. Which of the two it was says `delta_h/true_resampled`.

What rounding alone makes of it is `delta_h/true_floor`: the same computation with δθ = 0, between two scorings of E at
θ that put its sequences into different batches. A prediction below it cannot be held against the truth.

Cost: N responses generated and three forward passes over them, two more of each where E is drawn afresh.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.importance import (
    MIN_SEQUENCES,
    NUM_TOTALS,
    importance_weights,
    paired_change,
    reweighted_change,
    sequence_totals,
)
from rl_training.step.rollout import Rollout, take_rows
from rl_training.step.types import StepContext

MIN_ESS_FRACTION = 0.5  # below, a sequence more or less decides
NO_ERROR_BAR = "no error bar: it describes the evaluation buffer and estimates nothing beyond it"
NOT_FINITE = "a log-probability or an entropy of the evaluation buffer is not a finite number"
OVERFLOW = "the step changed a sequence's probability by more than float64 can hold"


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
        self._buffer: Rollout | None = None  # this rank's share
        self._before = self._again = torch.empty(0)  # (N, 3) totals at θ, of all ranks; and in another order

    def measures_at(self, step: int) -> bool:
        """Returns whether the truth is measured at this optimizer step, counted from 1."""
        return (step - 1) % self.every == 0

    def draw(self, ctx: StepContext) -> None:
        """Samples and scores the evaluation buffer at the present parameters, if this step is measured."""
        if not self.measures_at(ctx.step):
            return
        self._buffer = ctx.policy.sample(self.num_sequences, self._seed_of(ctx.step))
        self._before = self._totals(ctx, [self._buffer])
        by_length = self._buffer.completion_mask.sum(dim=1).argsort(stable=True)
        self._again = self._totals(ctx, [take_rows(self._buffer, rows) for rows in by_length.chunk(2)])

    def measure(self, ctx: StepContext) -> dict[str, Estimate]:
        """Returns the change of entropy since `draw`, and how it is known; nothing if this step is not measured."""
        if not self.measures_at(ctx.step):
            return {}
        assert self._buffer is not None, "draw(ctx) comes before the optimizer step"
        after = self._totals(ctx, [self._buffer])
        self._buffer = None
        weights = importance_weights(self._before, after)
        resampled = weights.ess < MIN_ESS_FRACTION * self.num_sequences  # the same on every rank; not where it is nan
        if resampled:
            fresh = ctx.policy.sample(self.num_sequences, self._seed_of(ctx.step))
            change = paired_change(self._before, self._totals(ctx, [fresh]))
        else:
            change = reweighted_change(self._before, after)
        floor = reweighted_change(self._before, self._again)
        return {
            "delta_h/true": self._known(change.token, change.token_stderr),
            "delta_h/true_sequence": self._known(change.sequence, change.sequence_stderr),
            "delta_h/true_floor": self._known(floor.token),
            "delta_h/true_resampled": self._known(float(resampled)),
            "delta_h/ess": self._known(weights.ess),
            "delta_h/weight_max": self._known(weights.largest),
            "delta_h/weight_min": self._known(weights.smallest),
        }

    def _seed_of(self, step: int) -> int:
        return (self.seed << 32) + step

    def _totals(self, ctx: StepContext, parts: list[Rollout]) -> Tensor:
        """Returns (N, 3): S, H and T of every sequence of every rank, on each rank, in the order they were drawn."""
        totals = torch.zeros(self.num_sequences, NUM_TOTALS, dtype=torch.float64, device=parts[0].prompt_ids.device)
        for part in parts:
            totals[part.prompt_index] = sequence_totals(ctx.policy.score_rollout(part))
        return ctx.reduce(totals)  # each row is one rank's, so their sum is all of them

    def _known(self, value: float, stderr: float = math.nan) -> Estimate:
        """Returns the estimate over all N sequences, nan with its reason when it is not a finite number."""
        if not math.isfinite(value):
            reason = OVERFLOW if math.isinf(value) else NOT_FINITE
            return Estimate(math.nan, num_samples=self.num_sequences, reason=reason)
        return Estimate(value, stderr, self.num_sequences, NO_ERROR_BAR if math.isnan(stderr) else "")

"""The ground truth probe: the entropy change across a real optimizer step, on sequences that training never sees.

The training batch is no ground truth: it shares its noise with the update that it made. So, around a step from θ to θ',

    before    an evaluation buffer E of N fresh responses to random prompts is sampled and scored at θ, and the first
              order predicted from E itself, X_E · δθ, where δθ has a formula
    after     E is scored at θ', and ΔH by per-decision importance sampling (per_decision.py); by the weights of whole
              sequences (importance.py), which is noisier, beside it; `forward` is held against it (calibration.py)

Prediction and truth of one E share their noise: in `delta_h/evaluation_error`, their difference block by block,
most of it cancels. That difference is the curvature of the step.

The weights can be trusted while θ' is near: with ESS < MIN_ESS_SHARE·N, E is drawn afresh at θ' with the same random
numbers, and ΔH is the difference of the two samples, pair by pair. `delta_h/true_resampled` records which.

`delta_h/true_floor` is the effect of rounding alone: the same computation with δθ = 0, between two scorings of E at
θ that put its sequences into different batches. A prediction below it cannot be checked against the truth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.engine.batch import Rollout, in_one_width, take_rows
from rl_training.engine.entropy_gradients import entropy_gradient
from rl_training.engine.policy import Policy
from rl_training.engine.probe import Need, Probe
from rl_training.engine.step import Step
from rl_training.mathematics import importance
from rl_training.mathematics.calibration import Calibration
from rl_training.mathematics.entropy import Target, surrogate_weights
from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR, Estimate
from rl_training.mathematics.jackknife import JackknifeUnits, Replicates
from rl_training.mathematics.per_decision import per_decision_change
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import dot

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

MOST_BLOCKS = 32  # as many are enough for an error; small microbatches make more


@dataclass(frozen=True)
class FreshSequences:
    """E: this rank's sequences, and what the policy says of them at θ."""

    rollout: Rollout
    sequences: JackknifeUnits  # each a unit of its own, over all ranks
    totals: Tensor  # (N, 3), `sequence_totals` of all ranks
    scores: Scores  # (B, T), as wide on every rank
    again: Scores  # the same from other batches


class GroundTruthProbe(Probe):
    """Measures the true change of entropy over each `every`-th optimizer step. See the module's docstring.

    every      measure each `every`-th step, the first one included
    sequences  N, over all ranks; the error falls as 1/√N
    seed       of the evaluation buffers. Step s of a run has its own, whether the run was resumed or not
    """

    name = "ground_truth"
    needs = Need.ENTROPY_CHANGE

    def __init__(self, every: int = 10, sequences: int = 512, seed: int = 0) -> None:
        super().__init__(every)
        if sequences < importance.MIN_SEQUENCES:
            raise ValueError(f"ground_truth: sequences={sequences} must be at least {importance.MIN_SEQUENCES}")
        if seed < 0:
            raise ValueError(f"ground_truth: seed={seed} must not be negative")
        self.sequences, self.seed = sequences, seed
        self._buffer: FreshSequences | None = None
        self._predicted: tuple[Replicates, JackknifeUnits] | None = None
        self._forward: Estimate | None = None  # what is held against the truth
        self.running = Calibration()

    def prepare(self, step: Step) -> None:
        no_truth, change = step.capabilities.no_fresh_responses, step.entropy_change
        self._forward = None if change.why_none else change.quantities["forward"].estimates(change.sums.num_folds)[0]
        targets = TARGETS[: 1 + change.settings.per_sequence]
        why_no_prediction = no_truth or change.why_none or step.optimizer.reason
        self._answers = dict.fromkeys(
            (f"{name}{suffix}" for name in PREDICTED for suffix in SUFFIXES[: len(targets)]),
            Estimate.missing(why_no_prediction or "not measured yet"),
        )
        self._buffer, self._predicted = None if no_truth else self._draw(step), None
        if self._buffer is not None and not why_no_prediction:
            rollout, scores = self._buffer.rollout, self._buffer.scores
            blocks = blocks_of(step, rollout, self.sequences)
            self._predicted = evaluation_change(step, rollout, scores, blocks, targets), blocks

    def after_step(self, step: Step) -> None:
        if self._buffer is None:
            self._answers |= dict.fromkeys(MEASURED, Estimate.missing(step.capabilities.no_fresh_responses))
        else:
            self._answers |= self._measured(step, self._buffer)
        self._buffer = self._predicted = None
        if self._forward is not None:
            self.running.add(self._forward, self._answers["delta_h/true"])
        self._answers |= {f"calibration/{name}": e for name, e in self.running.estimates().items()}

    def reads_new_weights(self) -> bool:
        return self._buffer is not None

    def _sample(self, step: Step) -> tuple[Rollout, JackknifeUnits]:
        """Returns N responses at the present parameters, the same random numbers at each call, each a unit."""
        rollout = step.policy.sample(self.sequences, (self.seed << 32) + step.number)
        return rollout, JackknifeUnits(rollout.prompt_index, self.sequences, step.ranks.reduce)

    def _draw(self, step: Step) -> FreshSequences:
        """Returns the evaluation buffer, sampled and scored at the present parameters."""
        rollout, sequences = self._sample(step)
        scores = step.policy.score_rollout(rollout)
        totals = sequences.gather(importance.sequence_totals(scores))
        width = int(sequences.gather(rollout.token_mask.sum(dim=1).double()).max())
        again = _widened(_scored_by_length(step.policy, rollout), width)
        return FreshSequences(rollout, sequences, totals, _widened(scores, width), again)

    def _measured(self, step: Step, buffer: FreshSequences) -> dict[str, Estimate]:
        """Returns the change of entropy since the buffer was drawn, and how it is known."""
        after = step.policy.score_rollout(buffer.rollout)
        totals = buffer.sequences.gather(importance.sequence_totals(after))
        after = _widened(after, buffer.scores.mask.shape[1])
        weights = importance.importance_weights(buffer.totals, totals)
        resampled = weights.ess < importance.MIN_ESS_SHARE * self.sequences  # on every rank; not where nan
        fresh = None
        if resampled:
            drawn, sequences = self._sample(step)
            fresh = sequences.gather(importance.sequence_totals(step.policy.score_rollout(drawn)))

        def true_change(units: JackknifeUnits) -> Replicates:
            if fresh is None:
                return per_decision_change(buffer.scores, after, units)
            pairs = importance.change_terms(buffer.totals, fresh, torch.ones_like(fresh[:, 0]))
            return importance.replicates_of_terms(units.gather(pairs[buffer.rollout.prompt_index]))

        change = true_change(buffer.sequences)
        snis = importance.reweighted_replicates(buffer.totals, totals)
        floor = per_decision_change(buffer.scores, buffer.again, buffer.sequences)
        alone = floor.value[0], resampled, weights.ess, weights.largest, weights.smallest
        values = [*change.value, snis.value[0], *alone]
        stderrs = [*change.stderr, snis.stderr[0], *(math.nan for _ in alone)]
        answers = {
            name: _estimate(float(value), float(stderr), self.sequences)
            for name, value, stderr in zip(MEASURED, values, stderrs, strict=True)
        }
        if self._predicted is not None:
            predicted, blocks = self._predicted
            answers |= _compared(predicted, true_change(blocks))
        return answers


def _compared(predicted: Replicates, true: Replicates) -> dict[str, Estimate]:
    """Returns the prediction from E, per token and as far as asked for per sequence, and how far it is off."""
    error = predicted - Replicates(true.value[: len(predicted.value)], true.without[:, : len(predicted.value)])
    count = len(predicted.without)
    enough = count >= MIN_FOLDS_FOR_STDERR
    no_bar = NOT_FINITE if enough else f"{count} blocks of sequences: an error bar needs {MIN_FOLDS_FOR_STDERR}"
    return {
        f"{name}{suffix}": _estimate(float(value), float(stderr) if enough else math.nan, count, no_bar)
        for name, replicates in zip(PREDICTED, (predicted, error), strict=True)
        for suffix, value, stderr in zip(SUFFIXES, replicates.value, replicates.stderr, strict=False)
    }


def _estimate(value: float, stderr: float, count: int, no_bar: str = NO_ERROR_BAR) -> Estimate:
    if not math.isfinite(value):
        return Estimate(math.nan, num_samples=count, reason=OVERFLOW if math.isinf(value) else NOT_FINITE)
    return Estimate(value, stderr, count, no_bar if math.isnan(stderr) else "")


def _scored_by_length(policy: Policy, rollout: Rollout) -> Scores:
    """Returns the scores of all rows once more, each in a batch with others of about its length."""
    order = rollout.completion_mask.sum(dim=1).argsort(stable=True)
    parts = [policy.score_rollout(take_rows(rollout, rows)) for rows in order.chunk(2)]
    both = torch.cat([torch.stack([part.logps, part.entropies]) for part in parts], dim=1)
    logps, entropies = both[:, order.argsort()]
    return Scores(logps, entropies, rollout.completion_mask)


def _widened(scores: Scores, width: int) -> Scores:
    """Returns the scores in tables of so many columns."""
    logps, entropies, mask = (in_one_width([v], at_least=width) for v in (scores.logps, scores.entropies, scores.mask))
    return Scores(logps, entropies, mask)


def blocks_of(step: Step, buffer: Rollout, num_sequences: int) -> JackknifeUnits:
    """Returns which block each of this rank's sequences is in: as many neighbours as a microbatch, or fewer."""
    size = max(1, min(len(step.batch.microbatch_rows[0]), num_sequences // MOST_BLOCKS))
    is_first = torch.zeros(num_sequences, dtype=torch.float64, device=buffer.prompt_index.device)
    is_first[buffer.prompt_index[::size]] = 1.0
    is_first = step.ranks.reduce(is_first)
    first = buffer.prompt_index[::size].repeat_interleave(size)[: buffer.num_sequences]
    return JackknifeUnits(is_first.long().cumsum(dim=0)[first] - 1, int(is_first.sum()), step.ranks.reduce)


def evaluation_change(
    step: Step, buffer: Rollout, scores: Scores, blocks: JackknifeUnits, targets: tuple[Target, ...]
) -> Replicates:
    """Returns X_E · δθ, (q,) nats for each target, and without each block, (blocks, q). A collective.

    E is independent of the training batch, so no fold has to be left out, and its prompts are unfiltered. With the
    weights of entropy.py, baseline "buffer", over E of all ranks,

        X_E · δθ = Σ_b x_b,   x_b = Σ_{i in block b} Σ_k (w_ik ∂log π(t_ik) + u_ik ∂h_ik) · δθ

    a block being what one backward takes. The level H_tok inside of the weights and their baseline are taken as given.

    scores   of this rank's share of E at the present parameters, in tables as wide on every rank
    targets  "token", "sequence": a backward for each
    """
    known = (scores.entropies.double(), scores.mask, buffer.prompt_index)
    reduce, change = step.ranks.reduce, step.entropy_change
    weights = [surrogate_weights(*known, target, "buffer", reduce) for target in targets]
    parameters, update = list(step.gradients.parameters.values()), change.update
    assert update is not None
    lengths = scores.mask.double().sum(dim=1)
    sizes = blocks.gather(torch.stack([torch.ones_like(lengths), lengths], dim=1))  # (blocks, 2)
    products = sizes.new_zeros(blocks.count, len(targets))
    for block in blocks.number.unique().tolist():
        rows = (blocks.number == block).nonzero().squeeze(1)
        with step.policy.measuring():
            fresh = step.policy.score(buffer, rows)
            width = fresh.logps.shape[1]
            pairs = [(w[rows, :width].to(fresh.logps), u[rows, :width].to(fresh.entropies)) for w, u in weights]
            directions = entropy_gradient(fresh, pairs, parameters, change.layout)
        products[block] = torch.stack([dot(direction, update) for direction in directions]).to(products)
    products = reduce(products) / sizes[:, 0].sum()  # each row is one rank's
    left = 1.0 - sizes / sizes.sum(dim=0)  # of E without a block, as a share of its sequences and of its tokens
    of_target = left[:, [int(target == "token") for target in targets]]
    total = products.sum(dim=0)
    return Replicates(total, (total - products) / of_target)

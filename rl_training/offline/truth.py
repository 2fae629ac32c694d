"""The change of entropy that the step really makes, measured on E, and how far the prediction is from it.

E is scored at θ + η δθ for each η asked for, and

    deltaH_true  by per-decision importance sampling (per_decision.py), whose first order is the estimator that
                 predicts: their difference on the same E is the curvature of the step, with little noise
    deltaH_snis  with the weights of whole sequences: the older estimate, noisier
    deltaH_odd   ½ (ΔH(+δθ) − ΔH(−δθ)): without the second order. No training takes the step −δθ: it validates
                 the first order only
    floor        the same computation with δθ = 0, between two scorings that put E's sequences into different batches

Below an effective sample size of MIN_ESS_SHARE of E the weights are not trusted (importance.py says why): fresh
responses are drawn at the moved parameters with common random numbers, and the change is the difference of pairs.

The error of a difference needs the prediction without each prompt, baseline included. It comes from the slopes of
all tokens along δθ (central differences over ±SLOPE_STEP·δθ, two scorings), and not from the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from rl_training.engine.batch import Rollout, take_rows
from rl_training.mathematics.importance import (
    LOGP,
    MIN_ESS_SHARE,
    Weights,
    importance_weights,
    paired_replicates,
    reweighted_replicates,
    sequence_totals,
)
from rl_training.mathematics.jackknife import JackknifeUnits, Replicates
from rl_training.mathematics.per_decision import first_order_change, mean_entropy, per_decision_change, slopes
from rl_training.mathematics.scores import Scores
from rl_training.offline.buffers import EvaluationBuffer, gather_scores, sample_again
from rl_training.offline.phases import Progress, silent
from rl_training.offline.restored import RestoredTrainer

SLOPE_STEP = 0.125


@dataclass(frozen=True)
class Moved:
    """Scores of E's sequences at moved parameters, and fresh responses there if importance weights are not trusted."""

    scores: Scores  # (N, L)
    fresh: Tensor | None = None  # (N, 3) totals of responses drawn afresh, where E's weights are not trusted
    rollout: Rollout | None = None  # this process's part of these

    def first(self, size: int) -> Moved:
        """Returns the same of the first sequences of E."""
        return Moved(first_rows(self.scores, size), None if self.fresh is None else self.fresh[:size])

    def change_from(self, before: Scores, units: JackknifeUnits) -> Replicates:
        """Returns ΔH from the parameters at which E was drawn: by E's weights, or pair by pair."""
        if self.fresh is None:
            return per_decision_change(before, self.scores, units)
        return paired_replicates(sequence_totals(before), self.fresh, units)


def first_rows(scores: Scores, size: int) -> Scores:
    return Scores(scores.logps[:size], scores.entropies[:size], scores.mask[:size])


@dataclass(frozen=True)
class AtStep:
    """What is measured at θ + η δθ; replicates are (2,) per token and per sequence, over E's prompts."""

    eta: float
    before: Scores  # (N, L), of E
    units: JackknifeUnits
    ahead: Moved
    behind: Moved | None  # at θ − η δθ, where odd is asked for

    @cached_property
    def true(self) -> Replicates:
        return self.ahead.change_from(self.before, self.units)

    @cached_property
    def snis(self) -> Replicates:
        return reweighted_replicates(sequence_totals(self.before), sequence_totals(self.ahead.scores), self.units)

    @cached_property
    def odd(self) -> Replicates | None:
        return None if self.behind is None else (self.true - self.behind.change_from(self.before, self.units)) * 0.5

    @cached_property
    def weights(self) -> Weights:
        return importance_weights(sequence_totals(self.before), sequence_totals(self.ahead.scores))

    @property
    def log_ratios(self) -> Tensor:
        """log π'(t)/π(t) of each sequence of E, (N,)."""
        return (sequence_totals(self.ahead.scores) - sequence_totals(self.before))[:, LOGP]

    @property
    def resampled(self) -> bool:
        """Whether `true` is of responses drawn afresh."""
        return self.ahead.fresh is not None

    def changes(self) -> dict[str, Replicates | None]:
        """Returns the measured changes by the names that they have in results."""
        return {"deltaH_true": self.true, "deltaH_snis": self.snis, "deltaH_odd": self.odd}

    def errors_of(self, predicted: Replicates) -> dict[str, Replicates | None]:
        """Returns how far a prediction from the same prompts is from what is measured."""
        odd = None if self.odd is None else predicted - self.odd
        return {"paired_error": predicted - self.true, "paired_error_odd": odd}

    def first(self, size: int) -> AtStep:
        """Returns the same of the first sequences of E, which are whole prompts."""
        units = JackknifeUnits(self.units.number[:size], int(self.units.number[size - 1]) + 1)
        behind = None if self.behind is None else self.behind.first(size)
        return AtStep(self.eta, first_rows(self.before, size), units, self.ahead.first(size), behind)


@dataclass(frozen=True)
class Truth:
    """The measured change of entropy, at each η in the order asked for."""

    at: tuple[AtStep, ...]
    before: Replicates  # H at the checkpoint
    floor: Replicates
    first_order: Replicates  # δH₁ of the full step from the slopes, without each prompt
    slopes: tuple[Tensor, Tensor]  # (N, L) each: ∂log π·δθ, ∂h·δθ

    @property
    def whole_step(self) -> AtStep:
        return next(at for at in self.at if at.eta == 1.0)


def measure(
    restored: RestoredTrainer,
    evaluation: EvaluationBuffer,
    delta: Tensor,
    etas: Sequence[float],
    odd: bool,
    progress: Progress = silent,
) -> Truth:
    """Returns the change of entropy along delta, (P,); the parameters are back, bit for bit, when it is done."""
    line, before, units = Line(restored, evaluation, delta, progress), evaluation.scores, evaluation.units
    along = line.slopes(SLOPE_STEP)
    again = _in_other_batches(restored, evaluation)
    progress(evaluation.num_sequences)
    return Truth(
        at=tuple(AtStep(eta, before, units, line.at(eta), line.at(-eta) if odd else None) for eta in etas),
        before=mean_entropy(before, units),
        floor=per_decision_change(before, again, units),
        first_order=first_order_change(before, *along, units),
        slopes=along,
    )


@dataclass(frozen=True)
class Line:
    """The parameters θ + η δθ, as E sees them."""

    restored: RestoredTrainer
    evaluation: EvaluationBuffer
    delta: Tensor  # (P,)
    progress: Progress = silent

    def slopes(self, eta: float) -> tuple[Tensor, Tensor]:
        """Returns ∂log π·δθ and ∂h·δθ of E's tokens, (N, L) each, by differences over ± η."""
        return slopes(self._score_at(eta), self._score_at(-eta), eta)

    def at(self, eta: float) -> Moved:
        """Returns E scored at θ + η δθ, and responses drawn afresh there where the weights are not to be trusted."""
        scores = self._score_at(eta)
        before, after = sequence_totals(self.evaluation.scores), sequence_totals(scores)
        if not importance_weights(before, after).ess < MIN_ESS_SHARE * len(before):  # nor where it is nan
            return Moved(scores)
        with self._shifted(eta):
            rollout, fresh = sample_again(self.restored, self.evaluation)
        return Moved(scores, sequence_totals(fresh), rollout)

    def _score_at(self, eta: float) -> Scores:
        evaluation = self.evaluation
        with self._shifted(eta):
            scores = gather_scores(self.restored, evaluation.rollout, evaluation.number, evaluation.num_sequences)
        self.progress(evaluation.num_sequences)
        return scores

    def _shifted(self, eta: float) -> AbstractContextManager[None]:
        return self.restored.policy.shifted(by_name(self.restored, eta * self.delta))


def num_scorings(etas: Sequence[float], odd: bool) -> int:
    """Returns how many times `measure` scores all of E."""
    return 3 + len(etas) * (1 + odd)


def _in_other_batches(restored: RestoredTrainer, evaluation: EvaluationBuffer) -> Scores:
    """Returns the scores of E at the checkpoint once more, with neighbours of about the same length."""
    order = evaluation.rollout.completion_mask.sum(dim=1).argsort(stable=True)
    rollout = take_rows(evaluation.rollout, order)
    return gather_scores(restored, rollout, evaluation.number[order], evaluation.num_sequences)


def by_name(restored: RestoredTrainer, flat: Tensor) -> dict[str, Tensor]:
    sizes = [param.numel() for param in restored.parameters.values()]
    pieces = zip(restored.parameters.items(), flat.split(sizes), strict=True)
    return {name: piece.view(param.shape).to(param.dtype) for (name, param), piece in pieces}

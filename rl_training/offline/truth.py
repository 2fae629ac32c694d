"""The entropy change that the step really makes, measured on E, and the prediction's difference from it.

E is scored at θ + η δθ for each requested η:

    deltaH_true  by per-decision importance sampling, or from fresh responses (probes/fresh_sample.py)
    deltaH_snis  with importance weights of whole sequences: the older and noisier estimate
    deltaH_odd   ½ (ΔH(+δθ) − ΔH(−δθ)), which has no second-order term. Training never takes the step −δθ: this only
                 validates the first-order prediction
    floor        the change that rounding alone would measure

The error of prediction minus measurement needs the prediction without each prompt, baseline included. That comes from
every token's slopes along δθ (central differences over ±SLOPE_STEP·δθ, two scorings), not from the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rl_training.entropy.per_decision import first_order_change, mean_entropy, per_decision_change, slopes
from rl_training.offline.buffers import SampledBuffer, gather_scores, sample_again
from rl_training.offline.phases import Progress, silent
from rl_training.offline.restored import RestoredTrainer
from rl_training.parallel.vectors import Vector
from rl_training.policy.scores import Scores
from rl_training.probes.fresh_sample import MeasuredChange, change_between, measure_change, score_in_other_batches
from rl_training.probes.importance import sequence_totals
from rl_training.statistics.jackknife import JackknifeUnits, Replicates

SLOPE_STEP = 0.125


@dataclass(frozen=True)
class AtStep:
    """The measurements at θ + η δθ. Replicates are (2,), per token and per sequence, in nats, over E's prompts."""

    eta: float
    forward: MeasuredChange
    backward: MeasuredChange | None  # at θ − η δθ; None unless `odd` is set

    @property
    def odd(self) -> Replicates | None:
        return None if self.backward is None else (self.forward.true - self.backward.true) * 0.5

    def changes(self) -> dict[str, Replicates | None]:
        """Return the measured changes by their names in the results."""
        return {"deltaH_true": self.forward.true, "deltaH_snis": self.forward.snis, "deltaH_odd": self.odd}

    def errors_of(self, predicted: Replicates) -> dict[str, Replicates | None]:
        """Return prediction minus measurement, for a prediction from the same prompts."""
        odd = None if self.odd is None else predicted - self.odd
        return {"paired_error": predicted - self.forward.true, "paired_error_odd": odd}

    def first(self, size: int) -> AtStep:
        """Return the measurements on the first `size` sequences of E, which must be whole prompts."""
        return AtStep(
            self.eta, _first(self.forward, size), None if self.backward is None else _first(self.backward, size)
        )


def _first(change: MeasuredChange, size: int) -> MeasuredChange:
    before, after = (Scores(s.logps[:size], s.entropies[:size], s.mask[:size]) for s in (change.before, change.after))
    number = change.units.number[:size]
    units = JackknifeUnits(number, int(number[-1]) + 1)
    fresh = None if change.fresh is None else change.fresh[:size]
    return change_between(before, after, JackknifeUnits.of_rows(number), units, fresh)


@dataclass(frozen=True)
class Truth:
    """The measured entropy change at each η."""

    at: tuple[AtStep, ...]  # in the order of the requested η
    before: Replicates  # H at the checkpoint
    floor: Replicates
    first_order: Replicates  # δH₁ of the full step, from the slopes
    slopes: tuple[Tensor, Tensor]  # (N, L) each: ∂log π·δθ, ∂h·δθ

    @property
    def whole_step(self) -> AtStep:
        return next(at for at in self.at if at.eta == 1.0)


def measure(
    restored: RestoredTrainer,
    evaluation: SampledBuffer,
    delta: Vector,
    etas: Sequence[float],
    odd: bool,
    progress: Progress = silent,
) -> Truth:
    """Measure the entropy change along δθ = `delta`. The parameters are restored bitwise. Collective.

    Args:
        etas: Multiples η of the step to measure.
        odd: Whether to measure at −η too.
    """
    before = evaluation.scores
    units = evaluation.units

    def scores(eta: float) -> Scores:
        """Return the scores of E's tokens at θ + η δθ, (N, L)."""
        with restored.stepped(delta, eta):
            moved = restored.policy.score_rollout(evaluation.rollout)
        progress(evaluation.num_sequences)
        return gather_scores(restored, moved, evaluation.score_rows, evaluation.num_sequences)

    def change(eta: float) -> MeasuredChange:
        def resample() -> Tensor:
            with restored.stepped(delta, eta):
                return sequence_totals(sample_again(restored, evaluation))

        return measure_change(evaluation, scores(eta), resample)

    along = slopes(scores(SLOPE_STEP), scores(-SLOPE_STEP), SLOPE_STEP)
    rescored = score_in_other_batches(restored.policy, evaluation.rollout)
    rescored = gather_scores(restored, rescored, evaluation.score_rows, evaluation.num_sequences)
    progress(evaluation.num_sequences)
    return Truth(
        at=tuple(AtStep(eta, change(eta), change(-eta) if odd else None) for eta in etas),
        before=mean_entropy(before, units),
        floor=per_decision_change(before, rescored, units),
        first_order=first_order_change(before, *along, units),
        slopes=along,
    )


def num_scorings(etas: Sequence[float], odd: bool) -> int:
    """Return how many times `measure` scores all of E."""
    return 3 + len(etas) * (1 + odd)

"""What other losses and settings would do at a checkpoint's next step: predicted and measured on the same E.

For each U and each intervention, δθ(w) is the whole step with the intervention, δθ the step as it is, and

    predicted   X̄_E · (δθ(w) − δθ)                   from the slopes of all of E's tokens along the difference
    measured    ΔH at θ + δθ(w), less ΔH at θ + δθ    per-decision importance sampling, over the same sequences

The same for reward: the slope of its mean, and its change by the weights of whole responses. Where the effective sample
size is below MIN_ESS_SHARE of E, fresh responses drawn with common random numbers are measured instead.

Errors are jackknife errors of the difference over E's prompts, for this U.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.engine.batch import Batch, Rollout
from rl_training.engine.changed_steps import bases_of
from rl_training.engine.loss_weights import LossWeights
from rl_training.engine.updates import Piece
from rl_training.interventions.loss import LossInputs, Remedied, loss_inputs
from rl_training.interventions.named import Intervention
from rl_training.mathematics.importance import (
    LOGP,
    MIN_ESS_SHARE,
    importance_weights,
    paired_replicates,
    sequence_totals,
)
from rl_training.mathematics.jackknife import Replicates
from rl_training.mathematics.per_decision import first_order_change, per_decision_change, slopes
from rl_training.mathematics.reward_change import mean_of, reward_change, reward_slope
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import Layout
from rl_training.offline.buffers import EvaluationBuffer, gather_scores, of_all_processes, rewards_of, sample_again
from rl_training.offline.loss import joined
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.truth import SLOPE_STEP, by_name
from rl_training.offline.update import Update, in_parts

PLAIN = "plain"
NOTHING = "exactly no effect at this step"
UNTRUSTED = "measured on fresh samples: the effective sample size was {:.0f} of {}"


@dataclass(frozen=True)
class Effect:
    """What an intervention changes on E compared with the plain step; for the plain step itself, its whole effect.

    Replicates are (2,): ΔH in nats per token and Δreward per response, leaving out each prompt.
    """

    predicted: Replicates
    measured: Replicates
    remark: str = ""


class OnEvaluation:
    """E with its rewards, for predicting and measuring what a step does to it.

    rewards  (N,), of E's responses
    """

    def __init__(self, restored: RestoredTrainer, evaluation: EvaluationBuffer) -> None:
        self._restored, self.evaluation = restored, evaluation
        self.rewards = self._rewards_of(evaluation.rollout)
        self.units = evaluation.units

    def predicted(self, delta: Tensor, size: float) -> Replicates:
        """Returns ΔH and Δreward along delta, (P,), to first order.

        size  the norm of a step: scores are taken as linear up to SLOPE_STEP of it
        """
        eta = SLOPE_STEP * size / float(delta.double().norm())
        before = self.evaluation.scores
        along = slopes(self._scores_at(eta * delta), self._scores_at(-eta * delta), eta)
        of_logps = along[0].masked_fill(before.mask == 0, 0.0).sum(dim=1)
        return _two(first_order_change(before, *along, self.units), reward_slope(self.rewards, of_logps, self.units))

    def measured(self, delta: Tensor) -> tuple[Replicates, str]:
        """Returns ΔH and Δreward at θ + delta, (P,), and a note where E's importance weights were not trusted."""
        before, after = self.evaluation.scores, self._scores_at(delta)
        totals = sequence_totals(before), sequence_totals(after)
        ess = importance_weights(*totals).ess
        if ess < MIN_ESS_SHARE * len(before.mask):
            with self._restored.policy.shifted(by_name(self._restored, delta)):
                fresh = self.answers()
            return self.difference((before, self.rewards), fresh), UNTRUSTED.format(ess, len(before.mask))
        log_ratios = totals[1][:, LOGP] - totals[0][:, LOGP]
        return _two(
            per_decision_change(before, after, self.units), reward_change(self.rewards, log_ratios, self.units)
        ), ""

    def answers(self) -> tuple[Scores, Tensor]:
        """Returns scores and rewards of fresh responses to E's prompts, with common random numbers."""
        rollout, scores = sample_again(self._restored, self.evaluation)
        return scores, self._rewards_of(rollout)

    def difference(self, one: tuple[Scores, Tensor], other: tuple[Scores, Tensor]) -> Replicates:
        """Returns entropy and reward of the second answers less those of the first, prompt by prompt."""
        entropy = paired_replicates(sequence_totals(one[0]), sequence_totals(other[0]), self.units)
        return _two(entropy, mean_of(other[1] - one[1], self.units))

    def _rewards_of(self, rollout: Rollout) -> Tensor:
        """Returns the rewards of all processes' responses to E's prompts, (N,)."""
        everything = of_all_processes(rollout, self._restored)
        return rewards_of(self._restored, self.evaluation.prompts, everything).double()

    def _scores_at(self, delta: Tensor) -> Scores:
        evaluation = self.evaluation
        with self._restored.policy.shifted(by_name(self._restored, delta)):
            return gather_scores(self._restored, evaluation.rollout, evaluation.number, evaluation.num_sequences)


def effects(
    on: OnEvaluation, restored: RestoredTrainer, update: Update, batch: Batch, which: Sequence[Intervention]
) -> Iterator[tuple[str, Effect | str]]:
    """Yields by name the effect of the plain step and the change by each intervention, or why it is unknown."""
    size = float(update.delta.double().norm())
    before, _ = on.measured(update.delta)
    yield PLAIN, Effect(on.predicted(update.delta, size), before)
    for name, delta in changed_steps(restored, update, batch, which):
        if isinstance(delta, str):
            yield name, delta
        elif torch.equal(delta, update.delta):
            nothing = before - before
            yield name, Effect(nothing, nothing, NOTHING)
        else:
            after, remark = on.measured(delta)
            yield name, Effect(on.predicted(delta - update.delta, size), after - before, remark)


def changed_steps(
    restored: RestoredTrainer, update: Update, batch: Batch, which: Sequence[Intervention]
) -> Iterator[tuple[str, Tensor | str]]:
    """Yields each intervention's name and δθ(w), (P,), in the order asked for; or why there is none."""
    loss = inputs_of(restored, batch, which)
    missing = {of.name: of.why_none(loss[0]) for of in which}
    remedied = {of.name: [of(part) for part in loss] for of in which if not missing[of.name]}
    further = {name: less(weights_of(parts, batch), batch.loss_weights) for name, parts in remedied.items()}
    layout = Layout(restored.parameters)
    known = (batch, restored.policy, list(restored.parameters.values()), layout)
    gradients = {
        list(further)[number]: torch.cat(basis.mean)
        for number, basis in bases_of(*known, list(further.values()), restored.reduce)
    }
    for of in which:
        if missing[of.name]:
            yield of.name, missing[of.name]
            continue
        how = remedied[of.name][0]
        gradient = update.gradient + gradients[of.name]
        threshold = update.max_grad_norm if how.max_grad_norm is None else how.max_grad_norm
        pieces = [_with_rate(piece, how.lr_factor) for piece in update.pieces]
        yield of.name, in_parts(pieces, gradient, threshold)[0].total


def inputs_of(restored: RestoredTrainer, batch: Batch, which: Sequence[Intervention]) -> list[LossInputs]:
    """Returns what the loss knows of each microbatch of U, with a reference's log-probabilities if asked for."""
    needed = any("reference" in of.remedy.needs for of in which)
    return loss_inputs(batch, restored.reduce, _reference(restored, batch.rollout) if needed else None)


def weights_of(parts: Sequence[Remedied], batch: Batch) -> LossWeights:
    """Returns the weights of the whole batch, (B, T), with an intervention."""
    plain, rows = batch.loss_weights, batch.microbatch_rows
    cut = [slice(of.start, of.stop) for of in rows]
    entropies = plain.entropies
    own = [LossWeights(plain.logps[at], None if entropies is None else entropies[at]) for at in cut]
    return joined([part.weights or weights for part, weights in zip(parts, own, strict=True)])


def less(weights: LossWeights, plain: LossWeights) -> LossWeights:
    """Returns weights less the plain ones."""
    zero = torch.zeros_like(plain.logps)
    logps = weights.logps - plain.logps
    one, other = (zero if of.entropies is None else of.entropies for of in (weights, plain))
    entropies = one - other
    return LossWeights(logps, entropies if entropies.any() else None)


def _two(entropy: Replicates, reward: Replicates) -> Replicates:
    """Returns ΔH per token and Δreward as one, (2,)."""
    return Replicates(
        torch.cat([entropy.value[:1], reward.value]), torch.cat([entropy.without[:, :1], reward.without], dim=1)
    )


def _with_rate(piece: Piece, factor: float) -> Piece:
    return dataclasses.replace(piece, state=dataclasses.replace(piece.state, lr=factor * piece.state.lr))


def _reference(restored: RestoredTrainer, rollout: Rollout) -> Tensor | None:
    """Returns the log-probabilities of the policy's reference, or else of the run's first model, (B, T)."""
    if restored.policy.has_reference or restored.first is None:
        return restored.policy.reference_logps(rollout)
    back = {name: restored.first[name] - param.detach() for name, param in restored.parameters.items()}
    with restored.policy.shifted(back):
        return restored.policy.score_rollout(rollout).logps

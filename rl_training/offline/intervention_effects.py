"""What other losses and settings would do at a checkpoint's next step: predicted and measured on the same E.

For each U and each intervention, δθ(w) is the whole step with the intervention, δθ the step as it is, and

    predicted   X̄_E · (δθ(w) − δθ)                   from the slopes of all of E's tokens along the difference
    measured    ΔH at θ + δθ(w), less ΔH at θ + δθ    per-decision importance sampling, over the same sequences

The same for reward: the slope of its mean, and its change by the weights of whole responses. Where the effective sample
size is below MIN_ESS_SHARE of E, fresh responses drawn with common random numbers are measured instead.

Errors are jackknife errors of the difference over E's prompts, for this U.

A branch takes several real steps from the checkpoint's weights and optimizer, at its learning rate; both are restored
bit for bit. All branches draw the same prompts with common random numbers, so they differ only by the intervention and
its effects. At the end fresh responses to E's prompts are drawn, again with common random numbers. It is the only
measurement that captures effects that grow with the distance, such as a KL term's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.engine.batch import Batch, Rollout
from rl_training.engine.changed_steps import Change, bases_of
from rl_training.engine.loss_weights import LossWeights
from rl_training.engine.updates import Piece
from rl_training.interventions.bases import groups_of
from rl_training.interventions.loss import LossInputs, loss_inputs
from rl_training.interventions.named import Intervention
from rl_training.mathematics.adamw import clip_coefficient
from rl_training.mathematics.importance import paired_replicates, sequence_totals
from rl_training.mathematics.jackknife import Replicates
from rl_training.mathematics.per_decision import first_order_change
from rl_training.mathematics.reward_change import mean_of, reward_change, reward_slope
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import Layout
from rl_training.offline.buffers import EvaluationBuffer, of_all_processes, rewards_of, sample_again, sample_update
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import Settings
from rl_training.offline.truth import SLOPE_STEP, AtStep, Line, by_name
from rl_training.offline.update import Update, batch_of, in_parts

Answers = tuple[Scores, Tensor]  # of responses to E's prompts, with their rewards
PLAIN = "plain"
NOTHING = "exactly no effect at this step"
BETWEEN_STEPS = 1009  # difference between the seeds of U of consecutive steps; a sweep uses other seeds
UNTRUSTED = "measured on fresh samples: the effective sample size was {:.0f} of {}"


@dataclass(frozen=True)
class Effect:
    """What an intervention changes on E compared with the plain step; for the plain step itself, its whole effect.

    Replicates are (2,): ΔH in nats per token and Δreward per response, leaving out each prompt.
    """

    predicted: Replicates | None  # None: not of one step
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
        before = self.evaluation.scores
        along = self._along(delta).slopes(SLOPE_STEP * size / float(delta.double().norm()))
        of_logps = along[0].masked_fill(before.mask == 0, 0.0).sum(dim=1)
        return _two(first_order_change(before, *along, self.units), reward_slope(self.rewards, of_logps, self.units))

    def measured(self, delta: Tensor) -> tuple[Replicates, str]:
        """Returns ΔH and Δreward at θ + delta, (P,), and a note where E's importance weights were not trusted."""
        at = AtStep(1.0, self.evaluation.scores, self.units, self._along(delta).at(1.0), None)
        if at.ahead.rollout is None:
            return _two(at.true, reward_change(self.rewards, at.log_ratios, self.units)), ""
        reward = mean_of(self._rewards_of(at.ahead.rollout) - self.rewards, self.units)
        return _two(at.true, reward), UNTRUSTED.format(at.weights.ess, len(at.before.mask))

    def answers(self) -> Answers:
        """Returns scores and rewards of fresh responses to E's prompts, with common random numbers."""
        rollout, scores = sample_again(self._restored, self.evaluation)
        return scores, self._rewards_of(rollout)

    def difference(self, one: Answers, other: Answers) -> Replicates:
        """Returns entropy and reward of the second answers less those of the first, prompt by prompt."""
        entropy = paired_replicates(sequence_totals(one[0]), sequence_totals(other[0]), self.units)
        return _two(entropy, mean_of(other[1] - one[1], self.units))

    def _rewards_of(self, rollout: Rollout) -> Tensor:
        """Returns the rewards of all processes' responses to E's prompts, (N,)."""
        everything = of_all_processes(rollout, self._restored)
        return rewards_of(self._restored, self.evaluation.prompts, everything).double()

    def _along(self, delta: Tensor) -> Line:
        return Line(self._restored, self.evaluation, delta)


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
    for name, found in changed_gradients(restored, update.gradient, batch, which):
        if isinstance(found, str):
            yield name, found
            continue
        gradient, change = found
        threshold = update.max_grad_norm if change.max_grad_norm is None else change.max_grad_norm
        pieces = [_with_rate(piece, change.lr_factor) for piece in update.pieces]
        yield name, in_parts(pieces, gradient, threshold)[0].total


def changed_gradients(
    restored: RestoredTrainer, plain: Tensor, batch: Batch, which: Sequence[Intervention]
) -> Iterator[tuple[str, tuple[Tensor, Change] | str]]:
    """Yields each intervention's name, U's gradient with it, (P,), and the change that it is; or why there is none.

    plain  (P,), U's gradient as it is
    """
    loss = inputs_of(restored, batch, which)
    missing = {of.name: of.why_none(loss[0]) for of in which}
    remedied = {of.name: [of(part) for part in loss] for of in which if not missing[of.name]}
    groups = groups_of(remedied, batch.loss_weights, batch.microbatch_rows, restored.reduce)
    group_of = {name: group for group in groups for name in group.changes}
    bases = [group.basis for group in groups if group.basis is not None]
    gradient_of = {id(bases[number]): gradient for number, gradient in _gradients(restored, batch, bases)}
    for of in which:
        if missing[of.name]:
            yield of.name, missing[of.name]
            continue
        group = group_of[of.name]
        change = group.changes[of.name]
        gradient = (1.0 + change.own) * plain
        if group.basis is not None:
            gradient += change.of_basis * gradient_of[id(group.basis)]
        yield of.name, (gradient, change)


def _gradients(restored: RestoredTrainer, batch: Batch, weights: Sequence[LossWeights]) -> Iterator[tuple[int, Tensor]]:
    """Yields the number and the gradient, (P,), of each of these weights of U's scores."""
    parameters = list(restored.parameters.values())
    found = bases_of(batch, restored.policy, parameters, Layout(restored.parameters), weights, restored.reduce)
    return ((number, torch.cat(basis.mean)) for number, basis in found)


def inputs_of(restored: RestoredTrainer, batch: Batch, which: Sequence[Intervention]) -> list[LossInputs]:
    """Returns what the loss knows of each microbatch of U, with a reference's log-probabilities if asked for."""
    needed = any("reference" in of.remedy.needs for of in which)
    return loss_inputs(batch, restored.reduce, _reference(restored, batch.rollout) if needed else None)


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


# --- several real steps -----------------------------------------------------------------------------------------------


def branches(
    on: OnEvaluation,
    restored: RestoredTrainer,
    settings: Settings,
    which: Sequence[Intervention],
    steps: int,
    seed: int,
) -> Iterator[tuple[str, Replicates | str]]:
    """Yields by name, after so many steps, (ΔH, Δreward) of each branch beside the plain one; or why there is none.

    Replicates are (2,): nats per token and reward per response, leaving out each prompt of E.

    seed  of the first step's U
    """
    plain = _branch(on, restored, settings, None, steps, seed)
    assert not isinstance(plain, str)
    for of in which:
        answers = _branch(on, restored, settings, of, steps, seed)
        yield of.name, answers if isinstance(answers, str) else on.difference(plain, answers)


def _branch(
    on: OnEvaluation, restored: RestoredTrainer, settings: Settings, of: Intervention | None, steps: int, seed: int
) -> Answers | str:
    """Returns responses to E's prompts at the end of a branch, or the reason why it could not be taken."""
    with put_back(restored) as rates:
        for number in range(steps):
            asked = dataclasses.replace(settings.update, seed=seed + BETWEEN_STEPS * number)
            batch = batch_of(restored, sample_update(restored, asked, settings.memory.generation_size))
            ((_, gradient),) = _gradients(restored, batch, [batch.loss_weights])
            change = Change()
            if of is not None:
                ((_, found),) = changed_gradients(restored, gradient, batch, [of])
                if isinstance(found, str):
                    return found
                gradient, change = found
            _take_step(restored, gradient, change, rates)
        return on.answers()


def _take_step(restored: RestoredTrainer, gradient: Tensor, change: Change, rates: Sequence[float]) -> None:
    """Makes the optimizer's own step with this gradient, (P,), clipped here."""
    threshold = restored.optimizer.max_grad_norm if change.max_grad_norm is None else change.max_grad_norm
    clip = clip_coefficient(torch.linalg.vector_norm(gradient, dtype=torch.float64), threshold)
    for param, own in zip(restored.parameters.values(), by_name(restored, clip * gradient).values(), strict=True):
        param.grad = own
    optimizer = restored.trainer.optimizer
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = change.lr_factor * rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def put_back(restored: RestoredTrainer) -> Iterator[list[float]]:
    """A context that restores weights, optimizer states and learning rates, bit for bit and in the same tensors.

    It yields the learning rates of the optimizer's groups.
    """
    optimizer = restored.trainer.optimizer
    tensors: list[Tensor] = [*restored.parameters.values()]
    tensors += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    before, rates = [tensor.detach().clone() for tensor in tensors], [group["lr"] for group in optimizer.param_groups]
    try:
        yield rates
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

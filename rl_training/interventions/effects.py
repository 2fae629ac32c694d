"""What interventions do at one step: a pair (ΔH, Δreward) for each. See probes/interventions.py for the formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_training.engine.changed_steps import Change, ChangedSteps, Direction, bases_of
from rl_training.engine.loss_weights import LossWeights
from rl_training.engine.step import Step
from rl_training.engine.step_by_folds import StepByFolds
from rl_training.engine.updates import FoldMeans
from rl_training.interventions.bases import groups_of
from rl_training.interventions.loss import LossInputs
from rl_training.interventions.named import Intervention
from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.running_pairs import Pair
from rl_training.mathematics.sgd import SGDState


@dataclass(frozen=True)
class Effects:
    """What is measured of one step."""

    plain: Pair  # (ΔH per token, Δreward per response) of the step as it is
    by_name: Mapping[str, Pair]  # of each intervention, less that of the step as it is
    kept: Mapping[str, float]  # of each: what a step does once all of the momentum includes it, as a multiple of this
    has_reward: bool  # else every Δreward is nan


def effects_of(
    step: Step, loss: Sequence[LossInputs], reward: LossWeights | None, which: Sequence[Intervention]
) -> Effects:
    """Returns the effects of interventions, each available with this loss, at a step. A collective.

    reward  whose gradient is J, where the step's own gradient is not; None: unknown
    """
    kept = {each.name: kept_factor(each, step.optimizer.states or {}) for each in which}
    weights = {each.name: [each.weights(part) for part in loss] for each in which if each.function is not None}
    settings = {each.name: Change(0.0, 0.0, each.lr_factor, each.max_grad_norm) for each in which if not each.function}
    batch, reduce, count = step.batch, step.ranks.reduce, step.num_sequences
    without_basis, *groups = groups_of(weights, batch.loss_weights, batch.microbatch_rows, reduce)
    folds = StepByFolds(step)
    directions, gradient = [Direction(folds.rows)], folds.steps.gradient
    own_sample = batch.rollout.sampling_logps is None
    if own_sample and not step.capabilities.not_dr_grpo and batch.loss_settings is not None:
        group = batch.responses_per_prompt  # the step's own gradient, without a response's reward in its group's mean
        factor = -batch.loss_settings.max_length * group / (group - 1)
        directions.append(Direction(gradient.rows, [count * part for part in gradient.mean], factor))
    elif reward is not None:
        ((_, basis),) = bases_of(step, [reward])
        directions.append(Direction(basis.rows, [count * part for part in basis.mean]))
    pairs: dict[str, Pair] = {}

    def measure(changes: Mapping[str, Change | None], basis: FoldMeans | None = None) -> None:
        products = ChangedSteps(folds.steps, reduce, basis).products(list(changes.values()), directions)
        pairs.update((name, folds.pair(*product)) for name, product in zip(changes, products, strict=True))

    measure({"": None} | settings | without_basis.changes)
    bases = [group.basis for group in groups if group.basis is not None]
    for number, basis in bases_of(step, bases):
        measure(groups[number].changes, basis)
    return Effects(pairs.pop(""), pairs, kept, len(directions) == 2)


def kept_factor(intervention: Intervention, states: Mapping[str, AdamWState | SGDState]) -> float:
    """Returns what a step does once all of the momentum includes an intervention, as a multiple of its effect now.

    (1 − β1^t) / (1 − β1) at the t-th step of Adam, 1 / (1 − μ) of SGD; 1 where only learning rates change, which act at
    once; nan where parameters differ.
    """
    if intervention.lr_factor != 1.0:
        return 1.0
    factors = set()
    for state in states.values():
        if isinstance(state, AdamWState):
            beta = state.betas[0]
            factor = (1.0 - beta ** (state.step + 1)) / (1.0 - beta)
        else:
            factor = 1.0 / (1.0 - state.momentum)
        factors |= {factor} if state.moves else set()
    return factors.pop() if len(factors) == 1 else math.nan

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
from rl_training.interventions.loss import LossInputs, over_the_others
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


def effects_of(step: Step, loss: Sequence[LossInputs], which: Sequence[Intervention]) -> Effects:
    """Returns the effects of interventions, each available with this loss, at a step. A collective."""
    batch, reduce, folds = step.batch, step.ranks.reduce, StepByFolds(step)
    steps, reward = folds.steps, _reward_gradient(step, folds.steps.gradient)
    directions = [Direction(folds.rows), *([] if reward is None else [reward])]
    pairs: dict[str, Pair] = {}

    def measure(changes: Mapping[str, Change | None], basis: FoldMeans | None = None) -> None:
        products = ChangedSteps(steps, reduce, basis).products(list(changes.values()), directions)
        pairs.update((name, folds.pair(*product)) for name, product in zip(changes, products, strict=True))

    weights = {each.name: [each.weights(part) for part in loss] for each in which if each.function is not None}
    settings = {each.name: Change(0.0, 0.0, each.lr_factor, each.max_grad_norm) for each in which if not each.function}
    without_basis, *groups = groups_of(weights, batch.loss_weights, batch.microbatch_rows, reduce)
    measure({"": None} | settings | without_basis.changes)
    for number, basis in bases_of(step, [group.basis for group in groups if group.basis is not None]):
        measure(groups[number].changes, basis)
    kept = {each.name: kept_factor(each, step.optimizer.states or {}) for each in which}
    return Effects(pairs.pop(""), pairs, kept, reward is not None)


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


def _reward_gradient(step: Step, gradient: FoldMeans) -> Direction | None:
    """Returns J of each fold, with its sum: the step's own gradient, or of another loss one of its own. A collective.

    None where the rewards are not known.
    """
    batch, group = step.batch, step.batch.responses_per_prompt
    without_own = group / (group - 1)  # a group's mean holds the response's own reward
    if not step.capabilities.not_dr_grpo and batch.loss_settings is not None:
        factor = -batch.loss_settings.max_length * without_own
        return Direction(gradient.rows, [step.num_sequences * part for part in gradient.mean], factor)
    rewards, mask = batch.rollout.rewards, batch.scores.mask
    if rewards is None:
        return None
    advantages = over_the_others(rewards, batch.rollout.prompt_index)
    weights = (advantages.unsqueeze(1) * mask * (without_own / len(mask))).to(batch.scores.logps)
    ((_, basis),) = bases_of(step, [LossWeights(weights, None)])
    return Direction(basis.rows, [step.num_sequences * part for part in basis.mean])

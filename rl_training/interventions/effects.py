"""What interventions do at one step: a pair (ΔH, Δreward) for each. See probes/interventions.py for the formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rl_training.engine.changed_steps import Change
from rl_training.engine.step import OptimizerView, Step
from rl_training.engine.step_by_folds import pairs_of
from rl_training.interventions.loss import loss_inputs, reward_gradient
from rl_training.interventions.named import PLAIN, Intervention
from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.running_pairs import Pair


@dataclass(frozen=True)
class Effects:
    """What is measured of one step."""

    pairs: Mapping[
        str, Pair
    ]  # (ΔH per token, Δreward per response): of PLAIN, the step as it is; of each, less PLAIN's
    kept: Mapping[str, float]  # what a step does once all of the momentum includes it, as a multiple of this step
    unavailable: Mapping[str, str]  # of those that are not in `pairs`: why not
    has_reward: bool  # else every Δreward is nan


def effects_of(step: Step, interventions: Sequence[Intervention]) -> Effects:
    """Returns the effects at a step of those interventions that are available with its loss. A collective."""
    kept = {each.name: kept_factor(each, step.optimizer) for each in interventions}
    with_reference = any("reference" in each.needs for each in interventions)
    reference = step.policy.reference_logps(step.batch.rollout) if with_reference else None
    loss, reward = loss_inputs(step.batch, step.ranks.reduce, reference), reward_gradient(step)
    settings: dict[str, Change | None] = {PLAIN: None}
    weights, unavailable = {}, {}
    for each in interventions:
        why = each.why_unavailable(loss[0])
        if why:
            unavailable[each.name] = why
        elif each.function is None:
            settings[each.name] = Change(lr_factor=each.lr_factor, max_grad_norm=each.max_grad_norm)
        else:
            weights[each.name] = torch.cat([each.weights(part).stacked() for part in loss], dim=1)
    return Effects(pairs_of(step, settings, weights, reward), kept, unavailable, reward is not None)


def kept_factor(intervention: Intervention, optimizer: OptimizerView) -> float:
    """Returns what a step does once all of the momentum includes an intervention, as a multiple of its effect now.

    (1 − β1^t) / (1 − β1) at the t-th step of Adam, 1 / (1 − μ) of SGD; 1 where only learning rates change, which act at
    once; nan where parameters differ.
    """
    if intervention.lr_factor != 1.0:
        return 1.0
    factors = set()
    for state in (optimizer.states or {}).values():
        if isinstance(state, AdamWState):
            beta = state.betas[0]
            factor = (1.0 - beta ** (state.step + 1)) / (1.0 - beta)
        else:
            factor = 1.0 / (1.0 - state.momentum)
        factors |= {factor} if state.moves else set()
    return factors.pop() if len(factors) == 1 else math.nan

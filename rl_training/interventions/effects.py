"""What interventions would do at one step: a pair (ΔH, Δreward) for each, and the strength that halves the step's ΔH.

See probes/interventions.py for the formulas.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from scipy.optimize import brentq

from rl_training.engine.changed_steps import Change, ChangedSteps, Direction, bases_of
from rl_training.engine.loss_weights import LossWeights
from rl_training.engine.step import Step
from rl_training.engine.step_by_folds import StepByFolds
from rl_training.interventions.bases import groups_of
from rl_training.interventions.loss import LossInputs, over_the_others
from rl_training.interventions.named import RATIOS_ARE_ONE, Intervention
from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.running_pairs import NOT_FINITE, Pair

QUANTITIES = ("delta_h", "delta_h_kept", "delta_reward", "price", "halves_at")
SMALLEST = 1e-4  # nats: predictions below it were not confirmed
NO_REWARD = "the gradient of the reward needs Dr-GRPO's loss, or the rewards, which are not known here"
LOST = "the interval of its ΔH includes 0"
TOO_SMALL = f"its ΔH is below {SMALLEST:g} nats"
NOT_LINEAR = "the gradient is not linear in the strength"
NO_STRENGTH = "it has no strength"
NO_FALL = "entropy does not fall significantly at this step"
NO_BAR = "no error bar"
NEVER_HALF = "no strength halves the fall: the rest of it comes from momentum"
TOLERANCE = 0.01  # relative, of the strength that halves the fall
FURTHEST = 4.0**7  # times an intervention's own strength
FIRST_OF_ADAM = "Adam's first step, whose size does not depend on the gradient's"


class Effects:
    """What is measured of one step: a pair (ΔH, Δreward) for each intervention, and what halves the step's ΔH."""

    def __init__(self, step: Step, loss: Sequence[LossInputs], which: Sequence[Intervention]) -> None:
        self._step, batch = step, step.batch
        self._is_dr_grpo = step.capabilities.dr_grpo and batch.loss_settings is not None
        self.has_reward = self._is_dr_grpo or batch.rollout.rewards is not None
        self._folds = StepByFolds(step)
        self._steps = step.entropy_change.steps_without
        of_entropy = Direction(step.entropy_change.rows)
        self._directions = [of_entropy, *([self._reward_gradient()] if self.has_reward else [])]
        self.plain = self._folds.pair(*ChangedSteps(self._steps).products([None], self._directions)[0])
        self.pairs: dict[str, Pair] = {}
        self.halves: dict[str, Estimate] = {}
        self._remedied = {of.name: [of(part) for part in loss] for of in which}
        self._which = {of.name: of for of in which}
        groups = groups_of(self._remedied, batch.loss_weights, batch.microbatch_rows, step.ranks.reduce)
        for group in groups:
            if group.basis is None:
                self._measure(ChangedSteps(self._steps), group.changes)
        further = [(group.basis, group.changes) for group in groups if group.basis is not None]
        known = (batch, step.policy, list(step.gradients.parameters.values()), step.entropy_change.layout)
        for number, basis in bases_of(*known, [weights for weights, _ in further], step.ranks.reduce):
            self._measure(ChangedSteps(self._steps, basis), further[number][1])

    def estimates(self, of: Intervention) -> dict[str, Estimate]:
        """Returns the estimates of this step."""
        pair = self.pairs[of.name]
        delta = pair.estimate(0, self._remark(of, pair))
        kept = self.kept(of)
        of_kept = dataclasses.replace(delta, value=kept * delta.value, stderr=kept * delta.stderr)
        if math.isnan(kept):
            of_kept = Estimate.missing("parameters with different betas have no common factor")
        reward, price = (Estimate.missing(NO_REWARD),) * 2
        if self.has_reward:
            reward = pair.estimate(1, delta.reason)
            price = Estimate.missing(TOO_SMALL) if abs(delta.value) < SMALLEST else pair.minus_ratio(LOST)
        return dict(zip(QUANTITIES, (delta, of_kept, reward, price, self.halves[of.name]), strict=True))

    def kept(self, of: Intervention) -> float:
        """Returns its effect, as a multiple of one step's, once all of the momentum includes it.

        1/(1 − β1) in a warm Adam; 1 where only learning rates change, which act at once; nan where parameters differ.
        """
        remedied = self._remedied[of.name][0]
        if remedied.weights is None and remedied.max_grad_norm is None:
            return 1.0
        factors = set()
        for state in (self._step.optimizer.states or {}).values():
            if isinstance(state, AdamWState):
                beta = state.betas[0]
                factor = (1.0 - beta ** (state.step + 1)) / (1.0 - beta)
            else:
                factor = 1.0 / (1.0 - state.momentum)
            factors |= {factor} if state.moves else set()
        return factors.pop() if len(factors) == 1 else math.nan

    def _remark(self, of: Intervention, pair: Pair) -> str:
        if of.remedy.nothing_on_policy:
            return RATIOS_ARE_ONE
        small = TOO_SMALL if abs(float(pair.values[0])) < SMALLEST else ""
        first = FIRST_OF_ADAM if self._step.capabilities.first_of_adam else ""
        return "; ".join(remark for remark in (of.remedy.remark, first, small) if remark)

    # --- the direction of the reward ----------------------------------------------------------------------------------

    def _reward_gradient(self) -> Direction:
        """Returns J of each fold, with its sum: the step's own gradient, or of another loss one of its own."""
        step, steps, group = self._step, self._steps, self._step.batch.responses_per_prompt
        batch, of_others = step.batch, group / (group - 1)
        if self._is_dr_grpo:
            assert batch.loss_settings is not None
            factor = -batch.loss_settings.max_length * of_others
            return Direction(steps.rows, [steps.total_size * part for part in steps.gradient], factor)
        rewards, mask = batch.rollout.rewards, batch.scores.mask
        assert rewards is not None
        advantages = over_the_others(rewards, batch.rollout.prompt_index)
        weights = LossWeights((advantages.unsqueeze(1) * mask * (of_others / len(mask))).to(batch.scores.logps), None)
        known = (batch, step.policy, list(step.gradients.parameters.values()), step.entropy_change.layout)
        ((_, basis),) = bases_of(*known, [weights], step.ranks.reduce)
        return Direction(basis.rows, [steps.total_size * part for part in basis.mean])

    # --- sums over folds --------------------------------------------------------------------------------------------

    def _measure(self, steps: ChangedSteps, changes: Mapping[str, Change]) -> None:
        products = steps.products(list(changes.values()), self._directions)
        for (name, change), of_change in zip(changes.items(), products, strict=True):
            pair = self._folds.pair(*of_change)
            self.pairs[name] = pair
            self.halves[name] = self._halving(self._which[name], steps, change, float(pair.values[0]))

    def _halving(self, of: Intervention, steps: ChangedSteps, change: Change, effect: float) -> Estimate:
        """Returns the strength that halves the plain step's fall. On all ranks alike: a collective at each trial."""
        remedy, fall = of.remedy, float(self.plain.values[0])
        why = _why_no_strength(of, self.plain)
        if why:
            return Estimate.missing(why)
        assert remedy.nothing is not None
        length = self._folds.length

        known = {0.0: 0.5 * fall, 1.0: 0.5 * fall + effect}

        def above(factor: float) -> float:
            if factor not in known:
                forward = self._step.ranks.reduce(steps.forward(change.times(factor), self._directions[0]))
                known[factor] = float(forward) / length - 0.5 * fall
            return known[factor]

        span = of.strength - remedy.nothing
        limit = min(FURTHEST, ((remedy.high if span > 0 else remedy.low) - remedy.nothing) / span)
        low, high = 0.0, 1.0
        while above(high) < 0.0:
            if high >= limit:
                return Estimate.missing(NEVER_HALF)
            low, high = high, min(4.0 * high, limit)
        if not math.isfinite(above(high)):
            return Estimate.missing(NOT_FINITE)
        factor = float(brentq(above, low, high, rtol=TOLERANCE))
        return Estimate(remedy.nothing + factor * span, reason=NO_BAR)


def _why_no_strength(of: Intervention, plain: Pair) -> str:
    """Returns why no strength of it halves the fall of the step as it is, "" if one may."""
    if not of.remedy.is_linear or of.remedy.nothing is None:
        return NO_STRENGTH if math.isnan(of.strength) else NOT_LINEAR
    return "" if plain.estimate(0).ends()[1] < 0.0 else NO_FALL


def kept_halving(of: Intervention, mean: Pair, plain: Pair, kept: float) -> Estimate:
    """Returns the strength that halves the mean fall once it is long in effect, extrapolated linearly from one step.

    mean, plain  over steps, of what it changes and of the step as it is        kept  times of a step's effect
    """
    low, high = mean.estimate(0).ends()
    why = _why_no_strength(of, plain) or (LOST if low <= 0.0 <= high else "")
    if why:
        return Estimate.missing(why)
    assert of.remedy.nothing is not None
    share = -0.5 * float(plain.values[0]) / (kept * float(mean.values[0]))
    strength = of.remedy.nothing + share * (of.strength - of.remedy.nothing)
    if not of.remedy.low < strength <= of.remedy.high:
        return Estimate.missing(NEVER_HALF)
    return Estimate(strength, reason=NO_BAR)

"""The interventions probe: what other losses or optimizer settings would do to entropy and reward at this step.

    ΔH        Σ_k n_k X_k · [δθ_(−k)(w) − δθ_(−k)] / Σ T    nats per token, relative to the plain step
    Δreward   Σ_k n_k J_k · [δθ_(−k)(w) − δθ_(−k)] / N      J_k, the gradient of the reward: reward_gradient.py
    price     −Δreward / ΔH                                 reward given up per nat kept
    kept      ΔH once all of the momentum includes the change: × (1 − β1^t) / (1 − β1) at step t of Adam
    halves    the strength whose kept ΔH would cancel half of the mean plain step's, by linear extrapolation

As in `simple`, each fold of whole prompts is multiplied with the step of the other folds; AdamW and clipping are
recalculated for the changed weights w. The error is the jackknife's for the DIFFERENCE to the plain step, which shares
the noise of X. For ΔH, this batch's two steps are taken as given. For Δreward, each fold is left out of the steps too,
because J and the step are the same gradient with the same noise. The cost is a forward pass and a backward over the
sequences whose weights change; interventions that are multiples of one another share them.

A single step does not show the long-run effect. `…/delta_h` is the effect on this step, and a warm Adam step has only
1 − β1 of its own gradient in it. `…_kept` is what a step does once the intervention has long been in effect. Adam
undoes a mere scaling of the gradient within 1/(1 − β2) steps. One batch gives sizes only to a factor of two: compare
the means over steps, `…/mean_…`. There, the weight of a step decays with each later optimizer step, measured or not.
Δreward refers to the prompts that training draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rl_training.engine.context import StepContext
from rl_training.engine.probe import Probe, Reading
from rl_training.errors import UserError
from rl_training.interventions.loss import loss_inputs
from rl_training.interventions.named import PLAIN, RATIOS_ARE_ONE, Intervention, list_of_names, parse_interventions
from rl_training.options import check_num_folds, check_share
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.running_pairs import Pair, RunningPair
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.needs import Need

DEFAULT_INTERVENTIONS = ("bonus", "psr", "nsr", "lr", "clip_cov")
QUANTITIES = (
    *("delta_h", "delta_h_kept", "delta_reward", "price"),
    *("mean_delta_h", "mean_delta_h_kept", "mean_delta_reward", "mean_price", "kept_halves_at"),
)
PLAIN_METRICS = tuple(
    f"intervention/{PLAIN}_{quantity}" for quantity in ("delta_h", "delta_reward", "mean_delta_h", "mean_delta_reward")
)
KEPT = "/kept"  # suffix: the running mean of an intervention's kept effect
MIN_DELTA_H = 1e-4  # nats: measurements did not confirm smaller predictions
OFF_POLICY = Unavailable(
    "off_policy_effects",
    "off-policy: where ratios differ from 1, predictions came out 1.6 times too large",
    fix="use one step per rollout",
)
INTERVAL_INCLUDES_ZERO = Unavailable("interval_holds_0", "the interval of its ΔH includes 0")
TOO_SMALL = Unavailable("too_small", f"its ΔH is below {MIN_DELTA_H:g} nats")
BY_SIGN = "the step takes only the gradient's signs, as Adam's first does: its size ignores the gradient's"
OTHER_BETAS = Unavailable("other_betas", "parameters with different betas have no common factor")
NOT_LINEAR = Unavailable("not_linear", "the gradient is not linear in the strength")
NO_STRENGTH = Unavailable("no_strength", "it has no strength")
NO_FALL = Unavailable("no_fall", "entropy does not fall significantly at this step")
NO_BAR = "no error bar"
NEVER_HALF = Unavailable("never_half", "no strength halves the fall: the rest of it comes from momentum")


class InterventionsProbe(Probe):
    """Predicts what interventions would do at this step. See the module's docstring.

    Args:
        which: Interventions by name, see interventions/named.py: bonus, bonus:0.02, my.py:softer, …
        every: Measure each `every`-th step.
        num_folds: Folds of whole prompts, over all ranks. None: as many as the other probes use.
        decay: Weight of an optimizer step, measured or not, relative to the next one in the means. 0.9 averages over
            about ten steps.
    """

    name = "interventions"
    needs = Need.FOLD_ENTROPY_GRADIENTS | Need.TERMS_CHECK
    takes_num_folds = True

    def __init__(
        self,
        which: Sequence[str] = DEFAULT_INTERVENTIONS,
        every: int = 10,
        num_folds: int | None = None,
        decay: float = 0.9,
    ) -> None:
        super().__init__(every)
        self.which = list_of_names(which, "interventions.which")  # with the file or module of a user's own function
        self._chosen = parse_interventions(self.which, "interventions.which")
        if not self._chosen:
            raise UserError(
                f"interventions: which=[] is empty: name some, such as which=[{','.join(DEFAULT_INTERVENTIONS)}]"
            )
        check_share("interventions: decay", decay, "(0, 1]", "; 0.9 averages over about ten steps")
        check_num_folds("interventions", num_folds)
        self.num_folds = num_folds
        self.decay = decay

    def init(self) -> dict[str, RunningPair]:
        """Return empty means over steps: of the plain step, and of each intervention's effect, immediate and kept."""
        suffixes = ("", KEPT)
        names = [PLAIN, *(intervention.name + suffix for intervention in self._chosen for suffix in suffixes)]
        return {name: RunningPair() for name in names}

    def measure(self, ctx: StepContext, state: dict[str, RunningPair]) -> Reading:
        step = ctx.step
        reason = ctx.effects_reason(OFF_POLICY)
        if reason:
            return Reading(dict.fromkeys((*PLAIN_METRICS, *self._metrics()), Estimate.missing(reason)), state=state)
        with_reference = any("reference" in intervention.needs for intervention in self._chosen)
        reference = ctx.policy.reference_logps(step.batch.rollout) if with_reference else None
        loss = loss_inputs(step.batch, ctx.ranks.reduce, reference)
        reward, no_multiple = ctx.reward_gradient()
        no_reward = no_multiple if reward is None else None
        unavailable = {intervention.name: intervention.unavailable_reason(loss[0]) for intervention in self._chosen}
        changes: dict[str, Any] = {PLAIN: None}
        weights = {}
        for intervention in self._chosen:
            if intervention.function is None:
                changes[intervention.name] = intervention.change
            elif not unavailable[intervention.name]:
                weights[intervention.name] = torch.cat([intervention.weights(part).stacked() for part in loss], dim=1)
        pairs = ctx.effects(changes, weights, reward)
        means = state | {PLAIN: state[PLAIN].add(pairs[PLAIN], step.number, self.decay)}
        estimates = [*pairs[PLAIN].estimates(no_reward), *means[PLAIN].mean().estimates(no_reward)]
        for intervention in self._chosen:
            name = intervention.name
            missing = unavailable[name]
            if missing:
                estimates += [Estimate.missing(missing)] * len(QUANTITIES)
                continue
            # A learning rate has its full effect at once.
            factor = 1.0 if intervention.lr_factor != 1.0 else step.optimizer.steady_state_factor
            for key, pair in ((name, pairs[name]), (name + KEPT, pairs[name].times(factor))):
                means[key] = means[key].add(pair, step.number, self.decay)
            estimates += self._estimates(ctx, intervention, pairs[name], factor, means, no_reward)
        return Reading(dict(zip((*PLAIN_METRICS, *self._metrics()), estimates, strict=True)), state=means)

    def num_vectors(self, fold_vectors: float) -> float:
        """Return fold_vectors + 1: a basis of changes for each fold and over all."""
        return fold_vectors + 1.0

    def _metrics(self) -> list[str]:
        return [
            f"intervention/{intervention.name}/{quantity}" for intervention in self._chosen for quantity in QUANTITIES
        ]

    def _estimates(
        self,
        ctx: StepContext,
        intervention: Intervention,
        pair: Pair,
        factor: float,
        means: Mapping[str, RunningPair],
        no_reward: Unavailable | None,
    ) -> list[Estimate]:
        """Return the QUANTITIES of an intervention at this step.

        Args:
            pair: ΔH per token and Δreward per response, relative to the plain step.
            factor: Factor on ΔH once the intervention has long been in effect; nan if unknown.
            means: Means over steps, this one included.
            no_reward: The reason why every Δreward is nan; None if there is none.
        """
        is_small = abs(float(pair.values[0])) < MIN_DELTA_H
        remarks = [intervention.remark, BY_SIGN * ctx.step.optimizer.has_sign_based_step, TOO_SMALL * is_small]
        remark = RATIOS_ARE_ONE if intervention.nothing_on_policy else "; ".join(filter(None, remarks))
        delta, reward = pair.estimates(no_reward, remark)
        running = means[intervention.name]
        mean, mean_kept = running.mean(), means[intervention.name + KEPT].mean()
        unknown = OTHER_BETAS if math.isnan(factor) else ""
        mean_delta, mean_reward = mean.estimates(no_reward)
        price, mean_price = (
            reward if no_reward else effects.minus_ratio(INTERVAL_INCLUDES_ZERO) for effects in (pair, mean)
        )
        return [
            delta,
            pair.times(factor).estimate(0, unknown or delta.reason),
            reward,
            Estimate.missing(TOO_SMALL) if is_small and not no_reward else price,
            replace(mean_delta, detail={"measured_steps": running.num_steps, **_unnamed_strength(intervention)}),
            mean_kept.estimate(0, unknown),
            mean_reward,
            mean_price,
            kept_halving(intervention, mean_kept, means[PLAIN].mean()),
        ]


def _unnamed_strength(intervention: Intervention) -> dict[str, float]:
    """Return an intervention's strength as a detail for records; {} if it has none, or if its name says it."""
    is_named = ":" in intervention.name or math.isnan(intervention.strength)
    return {} if is_named else {"strength": intervention.strength}


def kept_halving(intervention: Intervention, mean_kept: Pair, plain: Pair) -> Estimate:
    """Return the strength that would halve the mean fall of entropy once it has long been in effect.

    It extrapolates linearly from the effect at the current strength.

    Args:
        intervention: The intervention, with its current strength.
        mean_kept: Its kept effect relative to the plain step, averaged over steps.
        plain: The plain step, averaged over steps.
    """
    low, high = mean_kept.estimate(0).bounds()
    if not intervention.is_linear or intervention.neutral_strength is None:
        return Estimate.missing(NO_STRENGTH if math.isnan(intervention.strength) else NOT_LINEAR)
    if not plain.estimate(0).bounds()[1] < 0.0:
        return Estimate.missing(NO_FALL)
    if not (low > 0.0 or high < 0.0):
        return Estimate.missing(INTERVAL_INCLUDES_ZERO)
    share = -0.5 * float(plain.values[0]) / float(mean_kept.values[0])
    strength = intervention.neutral_strength + share * (intervention.strength - intervention.neutral_strength)
    if not intervention.low < strength <= intervention.high:
        return Estimate.missing(NEVER_HALF)
    return Estimate(strength, reason=NO_BAR)

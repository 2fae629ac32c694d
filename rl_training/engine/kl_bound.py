"""Choose the learning rate of each optimizer step so that its measured KL is a set share of the policy's entropy.

Before each step, the optimizer's formula gives its update δθ at the scheduled rate. The policies at θ and at θ + f δθ
are compared on a few responses of the step's own batch: KL(policy before ‖ after) is summed over the vocabulary at each
sampled token, and averaged over tokens (policy/token_distributions.py):

    target     c · H · s²                 c the set share, H the batch's entropy per token, s the schedule's factor
    first try  f = √(target / C) / η      η the scheduled rate; limited to .1 to 2 times the last step's f
    while KL > 2 target:  f ← f · √(target / KL), the root limited to .1 to .7, at most 8 times
    C ← C^.6 · (KL / (f η)²)^.4           the curvature, a geometric mean over the last steps

The optimizer then steps with its learning rate times f. The roots are there because KL is quadratic in the length of a
step: one measurement determines the factor. KL scatters with the responses it is measured on, by more than the
curvature changes from step to step, so the first try uses the averaged one. A step that has a formula is linear in the
learning rate, weight decay included. Scaling the rate thus scales the step and leaves the moments as they would be, and
a prediction made with the scaled rate is the prediction of the actual step.

Any other optimizer steps first, with the first factor on its rate. The weights are then moved back along the step.

The schedule keeps its meaning, warm-up included: its factor s on its highest rate becomes s² on the target.

Related methods: TRPO's trust region (Schulman et al. 2015, arXiv:1502.05477), which searches along a line; ACKTR's and
K-FAC's clipping by a predicted KL (Wu et al. 2017, arXiv:1708.05144), with the same root; the adaptive rates of rsl_rl,
which act on the next step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.costs import Costs
from rl_training.engine.kl_search import (
    BoundInfo,
    BoundState,
    info_without_search,
    require_quadratic_kl,
    search_factor,
)
from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.open_step import OpenStep
from rl_training.errors import UserError
from rl_training.optim.state import gradients_and_view, view_optimizer
from rl_training.optim.updates import OptimizerPieces, StepUpdate, clip_factors, compute_update
from rl_training.parallel.sums import dots
from rl_training.policy.rollout import Rollout, join_rollouts, response_index, take_rows
from rl_training.policy.scores import Scores
from rl_training.policy.token_distributions import TokenDistributions
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.jackknife import estimates_over_units
from rl_training.vocabulary import AUTO, AUTO_SHARE, KL_BOUND, MAX_SHARE

logger = logging.getLogger(__name__)

MIN_RESPONSES = 16  # that KL is measured on, over all ranks; at least one to each prompt
LOW_SCHEDULE = 1e-2  # a warm-up leaves factors below it within two steps
HELD_LOW = (
    "target_kl_share: the schedule holds the learning rate at {factor:.2g} of the optimizer's own, {rate:g}, so each "
    "step's KL is {square:.2g} of what the share says. Give the optimizer the rate that the schedule is to reach"
)


def share_of_entropy(target_kl_share: float | str | None) -> float | None:
    """Return the share that this setting asks for, AUTO_SHARE for "auto" and None for None.

    Raises:
        UserError: The share is neither "auto" nor a positive number, or it is too large.
    """
    if target_kl_share is None:
        return None
    number = AUTO_SHARE if target_kl_share == AUTO else target_kl_share
    if isinstance(number, str):  # from a command line
        with contextlib.suppress(ValueError):
            number = float(number)
    if not (isinstance(number, int | float) and 0.0 < number < math.inf):
        raise UserError(f'target_kl_share={target_kl_share!r} must be "auto", a positive number such as 1e-2, or None')
    if number > MAX_SHARE:
        raise UserError(
            f"target_kl_share={number:g} is above {MAX_SHARE:g}: steps that move the policy by such a share of its "
            'entropy destroy it within a few steps. Begin with "auto"'
        )
    return float(number)


@dataclass(frozen=True)
class _PolicyBefore:
    """The policy before a step, with which those after it are compared."""

    rollout: Rollout  # what KL is measured on
    distributions: TokenDistributions  # at the tokens of these responses
    weights: Mapping[str, Tensor]  # of this rank


@dataclass(frozen=True)
class _BoundedStep:
    """A step, from the choice of its learning rate until it has been made."""

    rates: Sequence[float]  # the scheduled rates of the optimizer's groups, while others are set
    target: float  # nats per token
    applied_factor: float  # on the rates with which the optimizer steps
    info: BoundInfo | None = None  # how the factor was found; None if the step has no formula, until it has been made
    before: _PolicyBefore | None = None  # kept for that case alone

    @property
    def rate(self) -> float:
        """The largest scheduled rate, for which the factor is searched."""
        return max(self.rates)


class KLBound:
    """Sets each step's learning rate so that its KL is the set share of entropy. See the module's docstring.

    Args:
        share: c, a step's KL divided by the policy's entropy, both per token.
        loop: The training loop, whose optimizer's rates it sets.
        costs: Takes the time.
        state: Of the last step, if training resumes from a checkpoint.

    Raises:
        UserError: The optimizer has no formula, and its weights are kept where they cannot be written.
    """

    name = KL_BOUND  # key of its state in a checkpoint

    def __init__(self, share: float, loop: LoopSpec, costs: Costs, state: BoundState) -> None:
        self._share = share
        self._shard = loop.shard
        self._policy = loop.policy
        self._ranks = loop.ranks
        self._costs = costs
        self._state = state
        self._step: _BoundedStep | None = None
        self._last_schedule_factor = 1.0
        self._has_warned = False  # of a schedule that stays low
        self._is_checked = False  # that KL is quadratic in the length of a step
        reason = view_optimizer(loop.shard).reason
        self._has_formula = not reason  # whether the optimizer's step can be calculated before it is made
        if reason and loop.shard.optimized is not loop.shard.trained:
            raise UserError(f"target_kl_share: {reason.message}, which DeepSpeed needs: use AdamW or Adam")

    def before_step(self, step: OpenStep) -> None:
        """Set the learning rates for a step whose gradients are complete, until `after_step` or `drop`. Collective."""
        with self._costs.timed(self.name):
            rollout = join_rollouts(step.rollouts)
            groups = self._shard.optimizer.param_groups
            self._step = self._bounded_step(rollout, step.join_scores(rollout), groups)
            for group in groups:
                group["lr"] = group["lr"] * self._step.applied_factor

    def _bounded_step(self, rollout: Rollout, scores: Scores, groups: Sequence[Mapping[str, Any]]) -> _BoundedStep:
        """Return the step with the factor to put on its rates. Collective.

        Args:
            rollout: The step's sequences.
            scores: From training's forward pass, (B, T) each.
            groups: The optimizer's, with the scheduled rates.
        """
        rates = [group["lr"] for group in groups]
        entropy = self._mean_over_tokens(scores.entropies, scores.mask)
        factor = schedule_factor(groups)
        self._warn_if_held_low(factor, groups)
        target = self._share * entropy * factor**2
        rate = max(rates)
        info = info_without_search(target, entropy, rate, self._state)
        if info is not None:
            return _BoundedStep(rates, target, info.factor, info)
        before = self._policy_before(rollout)
        if not self._has_formula:
            return _BoundedStep(rates, target, self._state.starting_factor(target, rate), before=before)
        update = self._scheduled_update()
        info = self._search(target, rate, lambda factor: self._kl_at(before, update, factor))
        return _BoundedStep(rates, target, info.factor, info)

    def _warn_if_held_low(self, factor: float, groups: Sequence[Mapping[str, Any]]) -> None:
        """Say once if the schedule stays at a small factor, which is no warm-up: LambdaLR with absolute rates, say."""
        if factor == self._last_schedule_factor < LOW_SCHEDULE and not self._has_warned and self._ranks.number == 0:
            self._has_warned = True
            rate = next(group["initial_lr"] for group in groups if group.get("initial_lr"))
            logger.warning(HELD_LOW.format(factor=factor, rate=rate, square=factor**2))
        self._last_schedule_factor = factor

    def after_step(self, step: OpenStep, was_taken: bool) -> None:
        """Reset the rates, and note in the step how it was bounded. Without a formula, shorten it now. Collective.

        Args:
            step: The step.
            was_taken: False if the loop skipped it.
        """
        with self._costs.timed(self.name):
            if was_taken:
                bounded = self._step
                assert bounded is not None
                info = bounded.info or self._shorten(bounded)
                step.bounding = info.estimates(bounded.rate * info.factor)
                self._state = self._state.after(info, bounded.rate)
            self.drop()

    def _shorten(self, step: _BoundedStep) -> BoundInfo:
        """Move the weights back along a step that was made without formula, as far as its KL says. Collective."""
        before = step.before
        assert before is not None
        applied = step.applied_factor
        update = {name: weight - before.weights[name] for name, weight in self._shard.copy_local_weights().items()}
        info = self._search(step.target, step.rate, lambda factor: self._kl_at(before, update, factor / applied))
        if info.factor == 0.0:  # the step could not be measured, perhaps because its update is not finite
            self._shard.load_local_weights(before.weights)
        elif info.factor != applied:
            share = info.factor / applied
            self._shard.load_local_weights({name: w + share * update[name] for name, w in before.weights.items()})
        return info

    def drop(self) -> None:
        """Reset the learning rates to the schedule's, and free what was kept for the step. Not collective."""
        if self._step is not None:
            for group, rate in zip(self._shard.optimizer.param_groups, self._step.rates, strict=False):
                group["lr"] = rate
        self._step = None

    @staticmethod
    def initial_states() -> dict[str, Any]:
        """Return its state at the start of a training run, by name."""
        return {KLBound.name: BoundState()}

    def states(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, by name."""
        return {self.name: self._state}

    def _policy_before(self, rollout: Rollout) -> _PolicyBefore:
        """Return the present policy, on the first responses to each prompt. Collective."""
        index = rollout.prompt_index
        number = math.ceil(MIN_RESPONSES / self._ranks.total(len(index.unique()), index.device))
        rows = (response_index(index) < number).nonzero().squeeze(1)
        measured = take_rows(rollout, rows)
        return _PolicyBefore(measured, self._policy.token_distributions(measured), self._shard.copy_local_weights())

    def _search(self, target: float, rate: float, kl_of: Callable[[float], Estimate]) -> BoundInfo:
        """Return the factor of a step, and how it was found. Collective.

        Args:
            target: nats per token.
            rate: The scheduled learning rate, the largest of the optimizer's groups.
            kl_of: Maps a factor to the KL per token of the step scaled by it, in nats.
        """
        kls: dict[float, Estimate] = {}  # by factor

        def value_of(factor: float) -> float:
            kls[factor] = kl_of(factor)
            return kls[factor].value

        info = search_factor(value_of, target, self._state, rate)
        if not self._is_checked and info.kl > 0.0:  # false if nan
            require_quadratic_kl(lambda factor: kl_of(factor).value, info)
            self._is_checked = True
        return dataclasses.replace(info, measured_kl=kls.get(info.factor))

    def _kl_at(self, before: _PolicyBefore, update: Mapping[str, Tensor], factor: float) -> Estimate:
        """Return KL(policy before ‖ policy after `factor` times the update), nats per token, with its error."""
        rollout = before.rollout
        weights = {name: (weight + factor * update[name]).to(weight.dtype) for name, weight in before.weights.items()}
        with self._policy.with_weights(weights):
            after = self._policy.token_distributions(rollout, like=before.distributions)
        prompts, prompt_of_row = rollout.prompt_index.unique(return_inverse=True)
        prompt = prompt_of_row.repeat_interleave(rollout.completion_mask.sum(dim=1))
        kl = before.distributions.kl_to(after)
        sums = torch.stack([kl, torch.ones_like(kl)], dim=1)
        by_prompt = sums.new_zeros(len(prompts), 2).index_add_(0, prompt, sums)
        return estimates_over_units(("kl",), lambda s: s[..., :1] / s[..., 1:], by_prompt, self._ranks.reduce)["kl"]

    def _scheduled_update(self) -> Mapping[str, Tensor]:
        """Return this rank's entries of the update that the optimizer would make at the scheduled rate, by name."""
        shard = self._shard
        gradients, view = gradients_and_view(shard, view_optimizer(shard))
        pieces = OptimizerPieces(shard.layout, shard.weights(), view.states)
        square = torch.zeros((), dtype=torch.float64, device=shard.layout.device)
        for piece in pieces:
            gradient = piece.of(gradients)
            square += dots(gradient, gradient)
        clip = float(clip_factors(self._ranks.reduce(square), view.max_grad_norm))
        return shard.layout.by_name(compute_update(shard.layout, StepUpdate(pieces, gradients, clip)))

    def _mean_over_tokens(self, values: Tensor, mask: Tensor) -> float:
        """Return the mean over the tokens of all ranks, 0 without any. Collective."""
        is_token = mask.bool()
        sums = torch.stack([values[is_token].double().sum(), is_token.sum().double()])
        total, count = self._ranks.reduce(sums).tolist()
        return total / count if count else 0.0


def schedule_factor(groups: Sequence[Mapping[str, Any]]) -> float:
    """Return the schedule's factor on the highest learning rate, at most 1, from the first group that has a rate.

    Schedules multiply the rate that the optimizer began with. OneCycleLR begins far below its `max_lr`, and any other
    that rises above the first rate has a factor of 1 there. 1 if no group has a first rate.
    """
    for group in groups:
        if group.get("initial_lr"):
            rate = float(group["lr"])
            highest = max(float(group["initial_lr"]), float(group.get("max_lr", 0.0)), rate)
            return rate / highest
    return 1.0

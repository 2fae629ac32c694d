"""An optimizer step that moves the policy by a set share of its entropy: the learning rate follows from a measured KL.

Before each step the optimizer's formula says what the step will do to the weights, δθ. The policy is scored at θ + f δθ
on a few responses of the step's own batch, and KL(policy before ‖ after), per token, is measured there:

    target     c · H · s²                 c the set share, H the batch's entropy per token, s the schedule's factor
    first try  f · √(target / KL of the last step), with f the factor of the last step; at most doubled
    while KL > 2 target:  f ← f · √(target / KL), by .1 to .7, at most 8 times

and the optimizer steps with its learning rate times f. KL is quadratic in the length of a step, hence the roots: one
measurement gives the factor, and after the first few steps one pass is all that it takes. The steps of AdamW, Adam and
SGD are linear in the learning rate, weight decay included, so a factor on the rate is a factor on the step, moments are
what they would be, and whatever predicts the step with that rate predicts the step that is made.

Any other optimizer steps first, with the first factor on its rate. Then the weights go back along the line of the step.

The schedule keeps its meaning. Its factor on the rate, s, is s² on the target, warm-up included.

Relatives: the trust region of TRPO (Schulman et al. 2015, arXiv:1502.05477), which searches along a line; ACKTR's and
K-FAC's clipping by a predicted KL (Wu et al. 2017, arXiv:1708.05144), with the same root; the adaptive rates of rsl_rl,
which act on the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.optim.state import gradients_and_states, view_optimizer
from rl_training.optim.updates import OptimizerPieces, clipping, compute_update
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sharding import Shard
from rl_training.parallel.vectors import dots
from rl_training.policy.policy import Policy
from rl_training.policy.rollout import Rollout, response_index, take_rows
from rl_training.policy.scores import Scores
from rl_training.statistics.estimate import Estimate

EXCESS = 2.0  # of the target, up to which a step is left as it is
SMALLEST_CUT, LARGEST_CUT = 0.7, 0.1  # by what one try may change the factor
LARGEST_GROWTH = 2.0  # from a step to the next
MAX_TRIES = 8
SAME = 1e-5  # nats: mean difference of log-probabilities that come from the same weights in fp32
LEAST_RATIO = 2.5  # of the KL of half a step to that of a quarter: 4 but for rounding and higher orders
NO_BAR = "no error bar: it describes this step"


@dataclass(frozen=True)
class BoundState:
    """What one step tells the next; a checkpoint keeps it."""

    factor: float = 1.0  # on the learning rate that the schedule says
    kl_over_target: float = math.nan  # of the step that was made; nan before the first

    @property
    def next_factor(self) -> float:
        """The first factor to try: what would have made the KL of the last step its target."""
        if math.isnan(self.kl_over_target) or self.kl_over_target <= 0.0:
            return self.factor  # nothing was measured, or no weight moved
        return self.factor * min(LARGEST_GROWTH, max(LARGEST_CUT, 1.0 / math.sqrt(self.kl_over_target)))


@dataclass(frozen=True)
class BoundInfo:
    """How the factor of a step was found."""

    target: float  # nats per token
    first_kl: float  # of the first factor that was tried, nats per token
    kl: float  # of the step that is made
    tries: int  # factors that were too large
    first_factor: float
    factor: float

    @property
    def share(self) -> float:
        """The share of the first step that is left."""
        return self.factor / self.first_factor if self.first_factor else 1.0


def search_factor(kl_of: Callable[[float], float], target: float, state: BoundState) -> tuple[BoundState, BoundInfo]:
    """Find the factor on a step whose KL is at most twice the target.

    Args:
        kl_of: factor → KL per token of the step that is so much longer, nats; nan or inf where the policy breaks.
        target: nats per token.
        state: of the step before.

    Returns:
        The state for the next step, and how the factor was found.

    >>> state, info = search_factor(lambda factor: 0.04 * factor**2, target=0.01, state=BoundState())
    >>> info.tries, round(info.factor, 6), round(info.kl, 6)
    (1, 0.5, 0.01)
    """
    factor = first_factor = state.next_factor
    kl = first_kl = kl_of(factor)
    tries = 0
    while not kl <= EXCESS * target and tries < MAX_TRIES:
        factor *= min(SMALLEST_CUT, max(LARGEST_CUT, math.sqrt(target / kl))) if math.isfinite(kl) else LARGEST_CUT
        kl = kl_of(factor)
        tries += 1
    over = kl / target if target > 0.0 else math.nan
    return BoundState(factor, over), BoundInfo(target, first_kl, kl, tries, first_factor, factor)


class KLBound:
    """Sets the learning rate of each step such that its KL is the set share of entropy. See the module's docstring.

    All calls are collectives.

    Args:
        share_of_entropy: c, KL of a step over the policy's entropy, both per token.
        responses_per_prompt: responses of every prompt that KL is measured on, the first ones.

    Raises:
        UserError: the share is not a positive number, or there are no responses to measure on.
    """

    name = "kl_bound"  # of its state in a checkpoint

    def __init__(self, share_of_entropy: float, responses_per_prompt: int = 2) -> None:
        if not (isinstance(share_of_entropy, int | float) and 0.0 < share_of_entropy < math.inf):
            raise UserError(
                f"target_kl_share={share_of_entropy!r} must be a positive number, for example 2e-3, or None"
            )
        if responses_per_prompt < 1:
            raise UserError(f"responses_per_prompt={responses_per_prompt} must be at least 1")
        self.share_of_entropy, self.responses_per_prompt = float(share_of_entropy), responses_per_prompt
        self.state = BoundState()
        self._rates: list[float] = []  # of the optimizer's groups, while others are set
        self._weights: Mapping[str, Tensor] = {}  # before the step, while it is made

    def start(self, shard: Shard, policy: Policy, ranks: Ranks, state: BoundState) -> None:
        """Learn where weights and optimizer lie. Call it when training begins.

        Args:
            state: of the step before, where it goes on from a checkpoint.

        Raises:
            UserError: the step has no formula, and its weights lie where they cannot be written.
        """
        self.state = state
        self._shard, self._policy, self._ranks, self._is_checked = shard, policy, ranks, False
        self._has_formula = not (reason := view_optimizer(shard).limit)
        if reason and shard.optimized is not shard.trained:
            raise UserError(f"target_kl_share: {reason.partition(':')[0]}, which DeepSpeed needs: use AdamW or Adam")

    def before_step(self, rollout: Rollout, scores: Scores) -> None:
        """Set the optimizer's learning rates for the step that its gradients are ready for, until `after_step`.

        Args:
            rollout: the sequences of the step.
            scores: of training's forward pass, (B, T) each.
        """
        rows = (response_index(rollout.prompt_index) < self.responses_per_prompt).nonzero().squeeze(1)
        self._before, self._rollout = self._scores_before(rollout, scores, rows), take_rows(rollout, rows)
        self._weights, groups = self._shard.copy_local_weights(), self._shard.optimizer.param_groups
        entropy = self._mean_over_tokens(scores.entropies, scores.mask)
        self._target = self.share_of_entropy * entropy * schedule_factor(groups) ** 2
        factor = self.state.next_factor
        if self._has_formula:
            step = self._scheduled_step()
            factor = self._search(lambda factor: self._kl_at(step, factor))
            self._weights = {}  # not needed any more
        self._rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor

    def after_step(self) -> dict[str, Estimate]:
        """Shorten a step that had no formula, restore the rates, and return how the step was bounded as metrics."""
        if not self._has_formula:
            first = self.state.next_factor
            moved = {name: weight - self._weights[name] for name, weight in self._shard.copy_local_weights().items()}
            factor = self._search(lambda factor: self._kl_at(moved, factor / first))
            if factor != first:
                self._shard.load_local_weights(
                    {name: w + factor / first * moved[name] for name, w in self._weights.items()}
                )
        rate = max(self._rates) * self._info.factor
        self.restore()
        self._weights = {}
        return as_estimates(self._info, rate)

    def _search(self, kl_of: Callable[[float], float]) -> float:
        """Return the factor of the step, and keep how it was found."""
        self.state, self._info = search_factor(kl_of, self._target, self.state)
        if not self._is_checked and self._info.kl > 0.0:
            refuse_what_is_not_quadratic(kl_of, self._info)
            self._is_checked = True
        return self._info.factor

    def _kl_at(self, step: Mapping[str, Tensor], factor: float) -> float:
        """Return KL(policy before ‖ policy with so much of a step), nats per token."""
        moved = {name: (weight + factor * step[name]).to(weight.dtype) for name, weight in self._weights.items()}
        with self._policy.with_weights(moved):
            after = self._policy.score_rollout(self._rollout)
        return self._mean_over_tokens(kl_of_tokens(self._before, after), self._before.mask)

    def restore(self) -> None:
        """Give the optimizer the schedule's learning rates again, once it has stepped."""
        for group, rate in zip(self._shard.optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []

    def _scores_before(self, rollout: Rollout, scores: Scores, rows: Tensor) -> Scores:
        """Return the scores of some rows with the weights before the step, as a measurement.

        Training's own are taken where they are those of a measurement: one row is scored once more to see it.
        """
        first = self._policy.score_rollout(take_rows(rollout, rows[:1]))
        apart = (first.logps - scores.logps[rows[:1]])[first.mask.bool()].double().abs().mean().nan_to_num(0.0)
        if float(self._ranks.max(apart)) <= SAME:
            return Scores(scores.logps[rows], scores.entropies[rows], scores.mask[rows])
        return self._policy.score_rollout(take_rows(rollout, rows))

    def _scheduled_step(self) -> Mapping[str, Tensor]:
        """Return this process's entries of the step that the optimizer would make with the schedule's rate, by name."""
        shard = self._shard
        gradients, view = gradients_and_states(shard, view_optimizer(shard))
        pieces = OptimizerPieces(shard.layout, shard.weights(), view.states)
        square = torch.zeros((), dtype=torch.float64, device=shard.layout.device)
        for piece in pieces:
            gradient = piece.of(gradients)
            square += dots(gradient, gradient)
        clip = float(clipping(self._ranks.reduce(square), view.max_grad_norm))
        return shard.layout.by_name(compute_update(shard.layout, pieces, gradients, clip))

    def _mean_over_tokens(self, values: Tensor, mask: Tensor) -> float:
        is_token = mask.bool()
        sums = torch.stack([values[is_token].double().sum(), is_token.sum().double()])
        total, count = self._ranks.reduce(sums).tolist()
        return total / count if count else 0.0


def kl_of_tokens(before: Scores, after: Scores) -> Tensor:
    """Return r − 1 − log r of each sampled token, with r its probability after over before, (B, T), nats.

    Its mean over samples of the policy before is KL(before ‖ after), and it is never negative (Schulman 2020,
    "Approximating KL divergence"). 0 where the mask is.
    """
    log_ratio = (after.logps.double() - before.logps.double()).masked_fill(before.mask == 0, 0.0)
    return log_ratio.expm1() - log_ratio


def schedule_factor(groups: Sequence[Mapping[str, Any]]) -> float:
    """Return the factor that a schedule has on the learning rate, by the first group that has a rate; 1 without one."""
    for group in groups:
        if group.get("initial_lr"):
            return float(group["lr"]) / float(group["initial_lr"])
    return 1.0


def refuse_what_is_not_quadratic(kl_of: Callable[[float], float], info: BoundInfo) -> None:
    """Check that half of a step has about four times the KL of a quarter.

    Raises:
        UserError: rounding is of the size of the target, so steps would be cut to nothing without a word.
    """
    quarter, half = kl_of(info.factor / 4.0), kl_of(info.factor / 2.0)
    if half < LEAST_RATIO * quarter:
        raise UserError(
            f"target_kl_share: a step with the KL {info.kl:.1e} has {half:.1e} at half its length and {quarter:.1e} at "
            f"a quarter, where 4 to 1 was to be: rounding hides smaller steps. Keep fp32 weights, or raise the target "
            f"of {info.target:.1e} nats per token"
        )


def as_estimates(info: BoundInfo, rate: float) -> dict[str, Estimate]:
    """Return how a step was bounded as metrics, with the largest learning rate of the optimizer's groups."""
    numbers = {
        "target_kl": info.target,
        "kl": info.kl,
        "first_kl": info.first_kl,
        "kept_share": info.share,
        "tries": float(info.tries),
        "rate_factor": info.factor,
        "learning_rate": rate,
    }
    return {f"bound/{name}": Estimate(value, reason=NO_BAR) for name, value in numbers.items()}

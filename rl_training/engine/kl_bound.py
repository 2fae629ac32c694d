"""Choose the learning rate of each optimizer step so that its measured KL is a set share of the policy's entropy.

Before each step, the optimizer's formula gives the change of the weights, δθ. The policy is scored at θ + f δθ on a few
responses of the step's own batch. This measures KL(policy before ‖ after) per token:

    target     c · H · s²                 c the set share, H the batch's entropy per token, s the schedule's factor
    first try  f · √(target / KL of the last step), with f the factor of the last step; limited to .1 f to 2 f
    while KL > 2 target:  f ← f · √(target / KL), the root limited to .1 to .7, at most 8 times

The optimizer then steps with its learning rate times f. The roots are there because KL is quadratic in the length of a
step: one measurement determines the factor, and after the first few steps a single pass is enough. The steps of AdamW,
Adam and SGD are linear in the learning rate, weight decay included. Scaling the rate thus scales the step and leaves
the moments as they would be, and a prediction made with the scaled rate is the prediction of the actual step.

Any other optimizer steps first, with the first factor on its rate. The weights are then moved back along the step.

The schedule keeps its meaning, warm-up included: its factor s on the rate becomes s² on the target.

Related methods: TRPO's trust region (Schulman et al. 2015, arXiv:1502.05477), which searches along a line; ACKTR's and
K-FAC's clipping by a predicted KL (Wu et al. 2017, arXiv:1708.05144), with the same root; the adaptive rates of rsl_rl,
which act on the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.kl_search import (
    BoundInfo,
    BoundState,
    info_without_search,
    require_quadratic_kl,
    search_factor,
)
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

SAME_SCORES = 1e-5  # nats: mean difference up to which log-probabilities count as those of the same weights in fp32
MAX_SHARE = 0.1  # a step of 1 to 2 times the entropy took held-out reward from .68 to .23 within six steps


class KLBound:
    """Sets each step's learning rate so that its KL is the set share of entropy. See the module's docstring.

    All methods except `restore` must be called on all ranks.

    Args:
        share_of_entropy: c, a step's KL divided by the policy's entropy, both per token.
        responses_per_prompt: Number of responses per prompt on which KL is measured, the first ones.

    Raises:
        UserError: The share is not a positive number or too large, or there are no responses to measure on.
    """

    name = "kl_bound"  # key of its state in a checkpoint

    def __init__(self, share_of_entropy: float, responses_per_prompt: int = 2) -> None:
        if not (isinstance(share_of_entropy, int | float) and 0.0 < share_of_entropy < math.inf):
            raise UserError(
                f"target_kl_share={share_of_entropy!r} must be a positive number, for example 2e-3, or None"
            )
        if share_of_entropy > MAX_SHARE:
            raise UserError(
                f"target_kl_share={share_of_entropy:g} is above {MAX_SHARE:g}: steps that move the policy by such a "
                "share of its entropy destroy it within a few steps. Begin with 2e-3"
            )
        if responses_per_prompt < 1:
            raise UserError(f"responses_per_prompt={responses_per_prompt} must be at least 1")
        self.share_of_entropy, self.responses_per_prompt = float(share_of_entropy), responses_per_prompt
        self.state = BoundState()
        self._rates: list[float] = []  # the scheduled rates of the optimizer's groups, while others are set
        self._weights: Mapping[str, Tensor] = {}  # before the step, until it has been made
        self._info: BoundInfo | None = None  # how the step's factor was found; None: it will be once it was made

    def start(self, shard: Shard, policy: Policy, ranks: Ranks, state: BoundState) -> None:
        """Read where weights and optimizer are kept. Call it when training begins.

        Args:
            shard: The trained parameters and their optimizer.
            state: Of the previous step, if training resumes from a checkpoint.

        Raises:
            UserError: The optimizer has no formula, and its weights are kept where they cannot be written.
        """
        self.state = state
        self._shard, self._policy, self._ranks, self._is_checked = shard, policy, ranks, False
        self._has_formula = not (reason := view_optimizer(shard).limit)
        if reason and shard.optimized is not shard.trained:
            raise UserError(f"target_kl_share: {reason.partition(':')[0]}, which DeepSpeed needs: use AdamW or Adam")

    def before_step(self, rollout: Rollout, scores: Scores) -> None:
        """Set the learning rates for the upcoming step, until `after_step`. The step's gradients are complete.

        Args:
            rollout: The step's sequences.
            scores: From training's forward pass, (B, T) each.
        """
        groups = self._shard.optimizer.param_groups
        entropy = self._mean_over_tokens(scores.entropies, scores.mask)
        self._target = self.share_of_entropy * entropy * schedule_factor(groups) ** 2
        rate, factor = max(group["lr"] for group in groups), self.state.next_factor
        self._info = info_without_search(self._target, entropy, rate, self.state)
        if self._info is not None:
            factor = self._info.factor
        else:
            rows = (response_index(rollout.prompt_index) < self.responses_per_prompt).nonzero().squeeze(1)
            self._old_scores, self._rollout = self._score_before_step(rollout, scores, rows), take_rows(rollout, rows)
            self._weights = self._shard.copy_local_weights()
            if self._has_formula:
                step = self._scheduled_step()
                factor = self._search(lambda factor: self._kl_at(step, factor))
                self._weights = {}  # no longer needed
        self._rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor

    def after_step(self) -> dict[str, Estimate]:
        """Shorten a step that had no formula, restore the rates, and return metrics of how the step was bounded."""
        if self._info is None:
            first, weights = self.state.next_factor, self._shard.copy_local_weights()
            changes = {name: weight - self._weights[name] for name, weight in weights.items()}
            factor = self._search(lambda factor: self._kl_at(changes, factor / first))
            if factor == 0.0:  # the step could not be measured, perhaps because its changes are not finite
                self._shard.load_local_weights(self._weights)
            elif factor != first:
                self._shard.load_local_weights(
                    {name: w + factor / first * changes[name] for name, w in self._weights.items()}
                )
        assert self._info is not None
        rate = max(self._rates) * self._info.factor
        self.restore()
        return self._info.estimates(rate)

    def _search(self, kl_of: Callable[[float], float]) -> float:
        """Return the factor of the step, and record how it was found."""
        self.state, self._info = search_factor(kl_of, self._target, self.state)
        if not self._is_checked and self._info.kl > 0.0:  # false if nan
            require_quadratic_kl(kl_of, self._info)
            self._is_checked = True
        return self._info.factor

    def _kl_at(self, step: Mapping[str, Tensor], factor: float) -> float:
        """Return KL(policy before ‖ policy after `factor` times the step), nats per token."""
        weights = {name: (weight + factor * step[name]).to(weight.dtype) for name, weight in self._weights.items()}
        with self._policy.with_weights(weights):
            after = self._policy.score_rollout(self._rollout)
        return self._mean_over_tokens(kl_of_tokens(self._old_scores, after), self._old_scores.mask)

    def restore(self) -> None:
        """Reset the learning rates to the schedule's, and free the weights kept for the step."""
        for group, rate in zip(self._shard.optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates, self._weights = [], {}

    def _score_before_step(self, rollout: Rollout, scores: Scores, rows: Tensor) -> Scores:
        """Return the scores of some rows with the weights before the step, computed as a measurement.

        Training's own scores are used if they equal a measurement's, which one row is scored again to find out.
        """
        first = self._policy.score_rollout(take_rows(rollout, rows[:1]))
        difference = (first.logps - scores.logps[rows[:1]])[first.mask.bool()].double().abs().mean().nan_to_num(0.0)
        if float(self._ranks.max(difference)) <= SAME_SCORES:
            return Scores(scores.logps[rows], scores.entropies[rows], scores.mask[rows])
        return self._policy.score_rollout(take_rows(rollout, rows))

    def _scheduled_step(self) -> Mapping[str, Tensor]:
        """Return this rank's entries of the step that the optimizer would take at the scheduled rate, by name."""
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
    """Return r − 1 − log r per sampled token, with r its probability after divided by before, (B, T), nats.

    It is never negative. Its mean over samples of the policy before is KL(before ‖ after) (Schulman 2020,
    "Approximating KL divergence"). Masked tokens are 0.
    """
    log_ratio = (after.logps.double() - before.logps.double()).masked_fill(before.mask == 0, 0.0)
    return log_ratio.expm1() - log_ratio


def schedule_factor(groups: Sequence[Mapping[str, Any]]) -> float:
    """Return the schedule's factor on the learning rate, from the first group that has a rate; 1 if none has."""
    for group in groups:
        if group.get("initial_lr"):
            return float(group["lr"]) / float(group["initial_lr"])
    return 1.0

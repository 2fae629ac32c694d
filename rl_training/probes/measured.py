"""What the last optimizer step did to entropy, length and reward: measured, with any optimizer.

This step's responses were sampled after the last step. The probe scores them once more with the weights from before
that step. Importance weights then give entropy, length and reward under the earlier policy (formulas:
probes/previous_policy.py). This needs no formula of the optimizer, no folds and no second backward. It measures steps
of any size, even if they were clipped or edited. It costs one forward pass over the chosen responses and the memory of
one vector of this rank's entries.

Steps that share a rollout are measured together, once the next rollout has been sampled. If `every` is above 1, all
steps since the last measured one are measured together too.

Each reward function is measured too (`measured/delta_reward/NAME`), also one with weight 0 that only watches. The sums
of these changes since the start of training, `measured/cumulative_reward/NAME`, show what training does to each reward.

In half precision, the rounding of two passes is as large as the effect of a small step. If training's forward pass is
rounded, the scores before the step δθ are therefore extrapolated from weights S = SPAN steps to either side,

    log π' ≈ log π − (log π(θ + S δθ) − log π(θ − S δθ)) / 2S,

and h' likewise: to first order in δθ. Errors are from the delete-one-prompt jackknife, with the variance averaged over
about three steps (statistics/running_variance.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.engine.probe import Probe, Reading
from rl_training.entropy.per_decision import slopes
from rl_training.options import check_share, check_whole, half_by_measured_step
from rl_training.parallel.sharded_vector import ShardedVector
from rl_training.policy.rollout import Rollout, response_index, take_rows
from rl_training.policy.scores import Scores
from rl_training.probes.previous_policy import (
    changes_of_sums,
    differences_before,
    have_others,
    sums_of_responses,
)
from rl_training.probes.running_sum import RunningSum
from rl_training.statistics.estimate import Estimate, effective_samples
from rl_training.statistics.jackknife import estimates_over_units
from rl_training.statistics.running_variance import RunningVariance
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.reasons import NO_OTHERS, NO_REWARDS, STEP_TAKEN_AGAIN

ENTROPY, LENGTH, REWARD = (
    ("measured/delta_h", "measured/delta_h_sequence"),
    "measured/delta_length",
    "measured/delta_reward",
)
CHANGES = (*ENTROPY, LENGTH, REWARD)
LENGTH_SUM, REWARD_SUM = "measured/cumulative_length", "measured/cumulative_reward"
KL, ESS, STEPS = "measured/kl", "measured/ess", "measured/steps"
NAMES = (*CHANGES, KL, ESS, STEPS, LENGTH_SUM, REWARD_SUM)
SPAN = 3  # steps to either side, if training's forward pass is rounded
MAX_RESCORE_DIFFERENCE = 1e-5  # nats: largest mean difference between log-probabilities of the same weights in fp32
MIN_ESS = 0.5  # share of the responses; with a smaller effective sample size, importance weights are worthless
FIRST = Unavailable("no_earlier_weights", "the weights before the last step are not known yet")
OLD_ROLLOUT = Unavailable(
    "old_rollout",
    "this rollout was sampled before an earlier step: its steps are measured together, with the next rollout",
)
ROUNDED = "a central difference over ± {span} steps, of first order: {why}"
LOW_ESS = Unavailable(
    "low_ess",
    "the effective sample size is {ess:.2f} of the responses, below {least}",
    fix="a lower learning rate makes smaller steps, and every=1 measures one at a time",
)
NO_BAR = "no error bar: it is a number of steps"


@dataclass(frozen=True)
class WeightsBefore:
    """The weights that the next measurement compares with, and the running variances of its errors."""

    weights: ShardedVector = field(default_factory=ShardedVector)  # before the last measured step
    step: int = 0  # that step's number; 0: none has been measured
    errors: RunningVariance = field(default_factory=RunningVariance)  # of the changes, at the last steps
    sums: RunningSum = field(default_factory=RunningSum)  # of the changes of length and of each reward
    first: int = 0  # the first step of the sums


class MeasuredStepProbe(Probe):
    """Measures the change of entropy, length and reward by the last step. See the module's docstring.

    Args:
        responses_per_prompt: The first responses to each prompt, which are scored again. Baselines use all responses.
        error_decay: Weight of an optimizer step, measured or not, relative to the next one in the average of single
            steps' variances. None: a half per measured step, which averages about three.
        every: Measure each `every`-th step: the change by all steps since the last measured one.
    """

    name = "measured"
    scores_responses = True

    def __init__(self, responses_per_prompt: int = 2, error_decay: float | None = None, every: int = 1) -> None:
        super().__init__(every)
        check_whole("measured: responses_per_prompt", responses_per_prompt, 1)
        error_decay = half_by_measured_step(every) if error_decay is None else error_decay
        check_share("measured: error_decay", error_decay, "[0, 1)", "; 0.5 averages over three steps")
        self.responses_per_prompt = responses_per_prompt
        self.error_decay = error_decay

    def init(self) -> WeightsBefore:
        return WeightsBefore()

    def measure(self, ctx: StepContext, state: WeightsBefore) -> Reading:
        reasons, fresh = ctx.reasons, ctx.step.batch.rollout.on_policy
        rows = self._rows(ctx)
        reason = reasons.sampling_mismatch or reasons.no_baseline or (None if fresh else OLD_ROLLOUT)
        reason = reason or ctx.scores_reason(rows)
        names = names_of_changes(ctx.step.batch.rollout)
        if reason:
            missing = dict.fromkeys(with_sums(names), Estimate.missing(reason))
            return Reading(measured=missing, state=state)
        shard, layout = ctx.policy.shard, ctx.step.gradients.layout
        is_repeated = state.step >= ctx.step.number
        if state.step and not is_repeated:
            estimates, state = self._changes(ctx, names, rows, state.weights.local(shard), state)
        else:
            estimates = dict.fromkeys(with_sums(names), Estimate.missing(STEP_TAKEN_AGAIN if is_repeated else FIRST))
        weights = ShardedVector.of(shard, layout.by_name(layout.vector(shard.copy_local_weights().values())))
        return Reading(measured=estimates, state=dataclasses.replace(state, weights=weights, step=ctx.step.number))

    def num_vectors(self, fold_vectors: float) -> float:
        """Return 3: the weights before and after the step, and the extrapolated ones if training is rounded."""
        return 3.0

    def _rows(self, ctx: StepContext) -> Tensor:
        """Return the indices of the responses to score again."""
        number = response_index(ctx.step.batch.rollout.prompt_index)
        return (number < self.responses_per_prompt).nonzero().squeeze(1)

    def _changes(
        self, ctx: StepContext, names: Sequence[str], rows: Tensor, before: Mapping[str, Tensor], state: WeightsBefore
    ) -> tuple[dict[str, Estimate], WeightsBefore]:
        """Return the estimates of the change since `before`, and the state with their variances and sums. Collective.

        If the scores show that the policy did not draw the responses, the estimates are missing and the state stays.

        Args:
            names: The names of the changes.
            rows: The responses to score again.
            before: This rank's entries of the state's weights, by name.
        """
        rollout, logs = ctx.step.batch.rollout, ctx.step.batch.log_ratios()
        assert logs is not None
        rounding = ctx.policy.scorer.training_rounding
        current, earlier = (rounded_scores_before if rounding else scores_before)(ctx, rows, before)
        mismatch = ctx.sampling_reason(rows, earlier, log_ratios_to_sampler(rollout, rows, current, earlier))
        if mismatch:
            return dict.fromkeys(with_sums(names), Estimate.missing(mismatch)), state
        rewards = rewards_of(rollout)
        terms = differences_before(current, earlier, rows, rollout.prompt_index, rewards, logs)
        by_prompt = ctx.step.batch.sum_by_prompt(
            sums_of_responses(ctx.step.batch.scores, rows, terms, logs, have_others(rewards, rollout.prompt_index))
        )
        estimates = estimates_over_units(
            (*names, KL, ESS), changes_of_sums, by_prompt, ctx.ranks.reduce, ctx.step.batch.copies.across_ranks_reason
        )
        num_rewarded = ctx.ranks.reduce(by_prompt[:, -rewards.shape[1] :].sum(dim=0)).tolist()
        for name, count in zip(names_of_rewards(rollout), num_rewarded, strict=True):
            if not count:
                estimates[name] = Estimate.missing(NO_REWARDS if rollout.rewards is None else NO_OTHERS)
        if ctx.reasons.relative_rewards:
            estimates[REWARD] = Estimate.missing(ctx.reasons.relative_rewards)
        if estimates[ESS].value < MIN_ESS:
            far = Estimate.missing(LOW_ESS.formatted(ess=estimates[ESS].value, least=MIN_ESS))
            estimates |= dict.fromkeys(names, far)
        state, sums = _add_to_sums(
            state, {name: estimates[name] for name in names if name not in ENTROPY}, ctx.step.number - 1
        )
        if not estimates[ESS].value < MIN_ESS:
            variance = torch.tensor([estimates[name].stderr ** 2 for name in names]).double()
            errors = state.errors.add(variance, ctx.step.number, self.error_decay)
            state = dataclasses.replace(state, errors=errors)
            remark = ROUNDED.format(span=SPAN, why=rounding) if rounding else ""
            averages = errors.average(self.error_decay)
            estimates |= _with_averaged_errors({name: estimates[name] for name in names}, *averages, remark)
        estimates[STEPS] = Estimate(ctx.step.number - state.step, reason=NO_BAR)
        estimates |= sums
        last_step = ctx.step.number - 1
        return {
            name: dataclasses.replace(estimate, about_step=last_step) for name, estimate in estimates.items()
        }, state


def names_of_changes(rollout: Rollout) -> tuple[str, ...]:
    """Return the names of the measured changes: of entropy, length, the trained reward, and each reward function."""
    return (*ENTROPY, LENGTH, *names_of_rewards(rollout))


def names_of_rewards(rollout: Rollout) -> tuple[str, ...]:
    """Return the names of the changes of reward, in the order of `rewards_of`."""
    return (REWARD, *(f"{REWARD}/{name}" for name in rollout.rewards_by_name))


def with_sums(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of all estimates, given those of the changes."""
    return (*names, KL, ESS, STEPS, *(_name_of_sum(name) for name in names if name not in ENTROPY))


def _name_of_sum(name: str) -> str:
    return name.replace("/delta_", "/cumulative_", 1)


def rewards_of(rollout: Rollout) -> Tensor:
    """Return the reward that is trained with and those of each function, (B, 1 + R) fp64; nan where unknown."""
    unknown = torch.full_like(rollout.advantages, torch.nan)
    trained = unknown if rollout.rewards is None else rollout.rewards
    return torch.stack([values.double() for values in (trained, *rollout.rewards_by_name.values())], dim=1)


def scores_before(ctx: StepContext, rows: Tensor, before: Mapping[str, Tensor]) -> tuple[Scores, Scores]:
    """Return all responses' scores with the current weights, and those of `rows` with earlier weights. Collective.

    Training's own scores serve as the current ones if a measurement would give the same. One row is scored again to
    find out; if it differs, all `rows` are scored again.
    """
    policy, rollout, current = ctx.policy, take_rows(ctx.step.batch.rollout, rows), ctx.step.batch.scores
    first = policy.score_rollout(take_rows(rollout, torch.zeros_like(rows[:1])))
    difference = (first.logps - current.logps[rows[:1]])[first.mask.bool()].double().abs()
    if not float(ctx.ranks.max(difference.mean().nan_to_num(0.0))) <= MAX_RESCORE_DIFFERENCE:  # dropout, TF32
        fresh = policy.score_rollout(rollout)
        logps, entropies = current.logps.clone(), current.entropies.clone()
        logps[rows], entropies[rows] = fresh.logps.to(logps), fresh.entropies.to(entropies)
        current = Scores(logps, entropies, current.mask)
    with policy.with_weights(before):
        return current, policy.score_rollout(rollout, varentropy=ctx.tests_sampling)


def log_ratios_to_sampler(rollout: Rollout, rows: Tensor, current: Scores, earlier: Scores) -> Tensor:
    """Return the log-ratio of the policy before the step to the one that drew each token of `rows`, (rows, T).

    The current policy drew them, or the sampler that reports log-probabilities.

    Args:
        rollout: The step's responses.
        rows: Some of them.
        current: The current policy's scores of all responses.
        earlier: The scores of `rows` by the policy before the step.
    """
    drawn = current.logps if rollout.sampling_logps is None else rollout.sampling_logps
    return (earlier.logps.double() - drawn[rows].double()).masked_fill(earlier.mask == 0, 0.0)


def rounded_scores_before(ctx: StepContext, rows: Tensor, before: Mapping[str, Tensor]) -> tuple[Scores, Scores]:
    """Return the same as `scores_before`, the earlier ones extrapolated (see the module's docstring). Collective."""
    policy, rollout, current = ctx.policy, take_rows(ctx.step.batch.rollout, rows), ctx.step.batch.scores
    current_weights = policy.shard.copy_local_weights()
    scores = []
    for steps in (-SPAN, SPAN):
        with policy.with_weights({name: w + steps * (w - before[name]) for name, w in current_weights.items()}):
            scores.append(policy.score_rollout(rollout, as_training=True))
    backward, forward = scores
    logps, entropies = slopes(forward, backward, SPAN)
    return current, Scores(
        current.logps[rows].double() - logps, current.entropies[rows].double() - entropies, forward.mask
    )


def _add_to_sums(
    state: WeightsBefore, changes: Mapping[str, Estimate], last_step: int
) -> tuple[WeightsBefore, dict[str, Estimate]]:
    """Return the state with these changes over `last_step` added to its sums, and the sums as estimates by name."""
    sums = state.sums.add(changes, last_step + 1 - state.step)
    first = state.first or state.step
    estimates = sums.estimates(changes, last_step + 1 - first)
    of_names = {_name_of_sum(name): estimate for name, estimate in estimates.items()}
    return dataclasses.replace(state, sums=sums, first=first), of_names


def _with_averaged_errors(
    estimates: Mapping[str, Estimate], variances: Tensor, batches: Tensor, remark: str
) -> dict[str, Estimate]:
    """Return the estimates with errors averaged over a few steps, and with `remark` if they have no other reason."""
    averaged = {}
    for (name, estimate), variance, count in zip(estimates.items(), variances.tolist(), batches.tolist(), strict=True):
        averaged[name] = dataclasses.replace(
            estimate,
            stderr=math.sqrt(variance),
            num_samples=effective_samples(estimate.num_samples, count),
            reason=estimate.reason or remark,
            detail={"stderr_of_batch": estimate.stderr},
        )
    return averaged

"""What the last optimizer step did to entropy, length and reward: measured, with any optimizer.

This step's responses were sampled after the last step. The probe scores them once more with the weights from before
that step. Importance weights then give entropy, length and reward under the earlier policy (formulas:
entropy/previous_policy.py). This needs no formula of the optimizer, no folds and no second backward. It measures steps
of any size, even if they were clipped or edited. It costs one forward pass over the chosen responses and the memory of
one vector of this rank's entries.

Steps that share a rollout are measured together, once the next rollout has been sampled. If `every` is above 1, all
steps since the last measured one are measured together too.

In half precision, the rounding of two passes is as large as the effect of a small step. If training's forward pass is
rounded, the scores before the step δθ are therefore extrapolated from weights S = SPAN steps to either side,

    log π' ≈ log π − (log π(θ + S δθ) − log π(θ − S δθ)) / 2S,

and h' likewise: to first order in δθ. Errors are from the delete-one-prompt jackknife, with the variance averaged over
about three steps (statistics/running_variance.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.engine.probe import Probe, Reading
from rl_training.entropy.per_decision import slopes
from rl_training.entropy.previous_policy import differences_before
from rl_training.entropy.weights import sums_before
from rl_training.options import check_share, check_whole, half_by_measured_step
from rl_training.parallel.sharded_vector import ShardedVector
from rl_training.policy.rollout import centre_by_prompt, response_index, take_rows
from rl_training.policy.scores import Scores
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.jackknife import estimates_over_units
from rl_training.statistics.limit import Limit
from rl_training.statistics.running_variance import RunningVariance
from rl_training.step.limits import NO_OTHERS, NO_REWARDS, STEP_TAKEN_AGAIN
from rl_training.step.score_check import ScoreCheck

CHANGES = tuple(f"measured/{name}" for name in ("delta_h", "delta_h_sequence", "delta_length", "delta_reward"))
KL, ESS, STEPS = "measured/kl", "measured/ess", "measured/steps"
NAMES = (*CHANGES, KL, ESS, STEPS)
SPAN = 3  # steps to either side, if training's forward pass is rounded
MAX_RESCORE_DIFFERENCE = 1e-5  # nats: largest mean difference between log-probabilities of the same weights in fp32
MIN_ESS = 0.5  # share of the responses; with a smaller effective sample size, importance weights are worthless
FIRST = Limit("first_step", "the weights before the last step are not known yet")
OLD_ROLLOUT = Limit(
    "old_rollout",
    "this rollout was sampled before an earlier step: its steps are measured together, with the next rollout",
)
ROUNDED = "a central difference over ± {span} steps, of first order: {why}"
LOW_ESS = Limit(
    "too_far",
    "the effective sample size is {ess:.2f} of the responses, below {least}",
    fix="a lower learning rate makes smaller steps, and every=1 measures one at a time",
)
NO_BAR = "no error bar: it is a number of steps"
REWARDED = -1  # the column of the sums that counts rewarded responses


@dataclass(frozen=True)
class WeightsBefore:
    """The weights that the next measurement compares with, and the running variances of its errors."""

    weights: ShardedVector = field(default_factory=ShardedVector)  # before the last measured step
    step: int = 0  # that step's number; 0: none has been measured
    errors: RunningVariance = field(default_factory=RunningVariance)  # of CHANGES, at the last steps


class MeasuredStepProbe(Probe):
    """Measures the change of entropy, length and reward by the last step. See the module's docstring.

    Args:
        responses_per_prompt: The first responses to each prompt, which are scored again. Baselines use all responses.
        error_decay: Weight of an optimizer step, measured or not, relative to the next one in the average of single
            steps' variances. None: a half per measured step, which averages about three.
        every: Measure each `every`-th step: the change by all steps since the last measured one.
    """

    name = "measured"

    def __init__(self, responses_per_prompt: int = 2, error_decay: float | None = None, every: int = 1) -> None:
        super().__init__(every)
        check_whole("measured: responses_per_prompt", responses_per_prompt, 1)
        error_decay = half_by_measured_step(every) if error_decay is None else error_decay
        check_share("measured: error_decay", error_decay, "[0, 1)", "; 0.5 averages over three steps")
        self.responses_per_prompt = responses_per_prompt
        self._error_decay = error_decay

    def init(self) -> WeightsBefore:
        return WeightsBefore()

    def measure(self, ctx: StepContext, state: WeightsBefore) -> Reading:
        limits, fresh = ctx.limits, ctx.step.batch.rollout.on_policy
        limit = limits.sampling_mismatch or limits.no_baseline or (None if fresh else OLD_ROLLOUT)
        limit = limit or self._scores_limit(ctx)
        if limit:
            return Reading(measured=dict.fromkeys(NAMES, Estimate.missing(limit)), state=state)
        shard, layout = ctx.policy.shard, ctx.step.gradients.layout
        assert shard is not None
        is_repeated = state.step >= ctx.step.number
        estimates = dict.fromkeys(NAMES, Estimate.missing(STEP_TAKEN_AGAIN if is_repeated else FIRST))
        errors = state.errors
        if state.step and not is_repeated:
            estimates, errors = self._changes(ctx, state.weights.local(shard), state)
            if ctx.limits.sampling_mismatch:  # its own passes have shown it
                estimates = dict.fromkeys(NAMES, Estimate.missing(ctx.limits.sampling_mismatch))
        weights = layout.by_name(layout.vector(shard.copy_local_weights().values()))
        return Reading(
            measured=estimates, state=WeightsBefore(ShardedVector.of(shard, weights), ctx.step.number, errors)
        )

    def num_vectors(self, num_folds: int) -> int:
        """Return 3: the weights before and after the step, and the extrapolated ones if training is rounded."""
        return 3

    def _rows(self, ctx: StepContext) -> Tensor:
        """Return the indices of the responses to score again."""
        number = response_index(ctx.step.batch.rollout.prompt_index)
        return (number < self.responses_per_prompt).nonzero().squeeze(1)

    def _scores_limit(self, ctx: StepContext) -> Limit | None:
        """Return the limit if the policy that probes score is not the trained one, else None. Collective."""
        if ctx.has_entropy_gradient:
            return None  # making the entropy gradient has already compared the scores with training's
        check = ScoreCheck(ctx.step.batch, ctx.policy, ctx.passes.residual_test)
        check.score_and_compare(self._rows(ctx))
        return check.limit(ctx.ranks.reduce, ctx.step.limits)

    def _changes(
        self, ctx: StepContext, before: Mapping[str, Tensor], state: WeightsBefore
    ) -> tuple[dict[str, Estimate], RunningVariance]:
        """Return the estimates of the change since `before`, and the running variances with theirs. Collective.

        Args:
            before: This rank's entries of the state's weights, by name.
        """
        batch, rounding = ctx.step.batch, ctx.policy.scorer.training_rounding
        rollout, logs = batch.rollout, batch.log_ratios()
        assert logs is not None
        rows = self._rows(ctx)
        score = rounded_scores_before if rounding else scores_before
        current, earlier = score(ctx, rows, before)
        test_tokens(ctx, rows, current, earlier)
        rewards = torch.full_like(rollout.advantages, torch.nan) if rollout.rewards is None else rollout.rewards
        terms = differences_before(current, earlier, rows, rollout.prompt_index, rewards, logs)
        has_others = centre_by_prompt(rewards, rollout.prompt_index)[1] > 1
        by_prompt = ctx.step.batch.sum_by_prompt(
            sums_of_responses(ctx, rows, terms, logs, ~rewards.isnan() & has_others)
        )
        estimates = estimates_over_units(
            (*CHANGES, KL, ESS), statistic, by_prompt, ctx.ranks.reduce, ctx.limits.copied_on_ranks
        )
        estimates[STEPS] = Estimate(ctx.step.number - state.step, reason=NO_BAR)
        if not float(ctx.ranks.reduce(by_prompt[:, REWARDED].sum())):
            estimates[CHANGES[3]] = Estimate.missing(NO_REWARDS if rollout.rewards is None else NO_OTHERS)
        if estimates[ESS].value < MIN_ESS:
            far = Estimate.missing(LOW_ESS.formatted(ess=estimates[ESS].value, least=MIN_ESS))
            estimates |= dict.fromkeys(CHANGES, far)
            errors = state.errors
        else:
            variance = torch.tensor([estimates[name].stderr ** 2 for name in CHANGES]).double()
            errors = state.errors.add(variance, ctx.step.number, self._error_decay)
            remark = ROUNDED.format(span=SPAN, why=rounding) if rounding else ""
            estimates |= _with_averaged_errors(estimates, *errors.average(self._error_decay), remark)
        if ctx.limits.relative_rewards:
            estimates[CHANGES[3]] = Estimate.missing(ctx.limits.relative_rewards)
        last_step = ctx.step.number - 1
        return {
            name: dataclasses.replace(estimate, about_step=last_step) for name, estimate in estimates.items()
        }, errors


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
        return current, policy.score_rollout(rollout, varentropy=ctx.passes.residual_test is not None)


def test_tokens(ctx: StepContext, rows: Tensor, current: Scores, earlier: Scores) -> None:
    """Test whether the policy drew the tokens of `rows` that are not tested yet (step/residual.py). Collective.

    These are scores by the policy before the step. Their residuals have mean 0 if tokens are weighted by the ratio of
    that policy to the one that drew them: the current one, or the sampler that reports log-probabilities.
    """
    test, rollout = ctx.passes.residual_test, ctx.step.batch.rollout
    if test is None or earlier.varentropies is None:
        return
    drawn = current.logps if rollout.sampling_logps is None else rollout.sampling_logps
    log_ratios = (earlier.logps.double() - drawn[rows].double()).masked_fill(earlier.mask == 0, 0.0)
    new = test.are_new(rows)
    scores = Scores(earlier.logps[new], earlier.entropies[new], earlier.mask[new], earlier.varentropies[new])
    test.add(rows[new], scores, log_ratios[new], rollout.untested)
    test.decide(ctx.ranks.reduce, ctx.step.limits.reused, rollout.sampling_logps is not None)


def rounded_scores_before(ctx: StepContext, rows: Tensor, before: Mapping[str, Tensor]) -> tuple[Scores, Scores]:
    """Return the same as `scores_before`, the earlier ones extrapolated (see the module's docstring). Collective."""
    policy, rollout, current = ctx.policy, take_rows(ctx.step.batch.rollout, rows), ctx.step.batch.scores
    assert policy.shard is not None
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


def sums_of_responses(ctx: StepContext, rows: Tensor, terms: Tensor, logs: Tensor, is_rewarded: Tensor) -> Tensor:
    """Return what each response adds to the sums of `statistic`, (B, 12).

    Args:
        rows: Indices of the responses that were scored again, (B',).
        terms: Their terms from `differences_before`, (B', 5).
        logs: log π − log μ of each token, (B, T).
        is_rewarded: Whether the response and another one to its prompt have a reward, (B,).
    """
    exact = ctx.step.batch.scores.exact()
    weights = exact.mask * sums_before(logs).exp()  # of tokens; 1 if the policy itself sampled
    entropies = (weights * exact.entropies).sum(dim=1)
    lengths, importance = weights.sum(dim=1), terms[:, 4].exp()
    of_terms = terms[:, :4].unbind(dim=1)
    columns = [
        torch.ones_like(importance),
        *of_terms,
        lengths[rows],
        importance,
        importance.square(),
        is_rewarded[rows].to(importance),
    ]
    scored = terms.new_zeros(len(lengths), len(columns))
    scored[rows] = torch.stack(columns, dim=1)
    return torch.cat([torch.stack([torch.ones_like(lengths), entropies, lengths], dim=1), scored], dim=1)


def statistic(sums: Tensor) -> Tensor:
    """Return (…, 6): CHANGES, the KL divergence per token, and the effective sample size as a share of responses."""
    level_sums, scored = sums[..., :3], sums[..., 3:] / sums[..., 3:4]
    entropy, length = (level_sums[..., 1:] / level_sums[..., :1]).unbind(-1)
    _, entropy_change, length_change, reward_change, kl, tokens, weight, weight_square, rewarded = scored.unbind(-1)
    per_token = entropy / length - (entropy + entropy_change) / (length + length_change)
    reward, effective = -reward_change / rewarded, weight.square() / weight_square
    return torch.stack([per_token, -entropy_change, -length_change, reward, kl / tokens, effective], dim=-1)


def _with_averaged_errors(
    estimates: Mapping[str, Estimate], variances: Tensor, batches: Tensor, remark: str
) -> dict[str, Estimate]:
    """Return CHANGES with errors averaged over a few steps, and with `remark` if they have no other reason."""
    averaged = {}
    for name, variance, count in zip(CHANGES, variances.tolist(), batches.tolist(), strict=True):
        estimate = estimates[name]
        averaged[name] = dataclasses.replace(
            estimate,
            stderr=math.sqrt(variance),
            num_samples=1 + int((estimate.num_samples - 1) * count + 1e-9),
            reason=estimate.reason or remark,
            detail={"stderr_of_batch": estimate.stderr},
        )
    return averaged

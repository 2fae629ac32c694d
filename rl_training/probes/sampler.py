"""The sampler probe: how far the policy that generates is from the policy that is trained, and what that costs.

An engine with another precision, other kernels or older weights samples from μ, while the step trains π. With
d = log π − log μ of each sampled token and ρ = exp Σ d of a response, all RAW, before the loss truncates or masks them:

    kl             E_μ[e^d − 1 − d] per token: KL(μ‖π), each term ≥ 0 (Schulman 2020)
    ratio_outside  share of the tokens with e^d outside [.9, 1.1]
    ess            (Σ ρ)² / (N Σ ρ²), about exp(−2 KL T): importance weights work for responses of up to .35 / KL tokens
    mean_ratio     Σ ρ / N. It is 1 in expectation unless μ never samples some tokens that π does. Below 1, the sampler
                   truncates its distribution (top-p, top-k), or it reports log-probabilities other than it samples with
    reward_gap     Σ ρ r / Σ ρ − Σ r / N: the reward of π minus the logged reward, which is μ's
    corrected_share  share of the tokens whose ratio the loss truncates or masks

Error bars are from the jackknife over prompts, each with all its responses. If the policy itself sampled, every ratio
is 1. With `numerics`, some rows are scored again one by one: any difference comes from the trainer's numerics alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.engine.probe import Probe, Reading
from rl_training.options import check_flag
from rl_training.policy.rollout import response_index
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.jackknife import estimates_over_units
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import Batch
from rl_training.step.reasons import NO_REWARDS, NO_SAMPLING_LOGPS
from rl_training.step.residual import NOT_DRAWN

METRICS = ("kl", "ratio_outside", "ess", "mean_ratio", "reward_gap", "corrected_share")
NUMERICS = ("numerics_kl", "numerics_outside")
LOW, HIGH = 0.9, 1.1  # bounds of a token's ratio for `ratio_outside`
ROWS = 8  # rows to score again on each rank, one per prompt
MIN_ESS, CERTAINTY, MIN_GAP = 0.9, 0.9999, 1e-3  # TRUNCATED_SAMPLER needs such an ESS, certainty and gap
SAMPLED_BY_POLICY = "no error bar: the responses are sampled from this policy, so every ratio is 1"
TRUNCATED_SAMPLER = Unavailable(
    "truncated_sampler",
    "below 1: the sampler never draws some tokens that this policy can draw (top-p, top-k, min-p), or it reports other "
    "log-probabilities than it samples with (temperature)",
)
NO_LOGP = "the sampler gave no log-probability of {share:.1%} of the tokens: their ratio counts as 1, as in TRL's loss"
NO_LOSS = Unavailable("unknown_loss", "how this loss treats the ratios to the sampler is not known")


class SamplerProbe(Probe):
    """Measures how far the sampler is from the policy that is trained. See the module's docstring.

    Args:
        every: Measure each `every`-th step.
        numerics: Also score some rows one by one, to tell numerics from staleness. Each row costs a forward pass.
    """

    name = "sampler"

    def __init__(self, every: int = 1, numerics: bool = False) -> None:
        super().__init__(every)
        check_flag("sampler: numerics", numerics)
        self.numerics = numerics

    def measure(self, ctx: StepContext, state: Any) -> Reading:
        batch = ctx.step.batch
        logs = batch.log_ratios()
        names = tuple(f"sampler/{name}" for name in METRICS)
        sampler_reason = ctx.reasons.sampling_mismatch
        is_reported = batch.rollout.sampling_logps is not None
        if sampler_reason and is_reported and sampler_reason.code != NOT_DRAWN.code:
            sampler_reason = None  # the ratios are still those to the reported sampler
        if logs is None or sampler_reason:  # without this, an unknown sampler's ratios would be 1
            estimates = dict.fromkeys(names, Estimate.missing(sampler_reason or NO_SAMPLING_LOGPS))
        else:
            estimates = estimates_over_units(
                names, _statistic, batch.sum_by_prompt(_sums_of_sequences(batch, logs)), ctx.ranks.reduce,
                ctx.reasons.split_prompts or batch.copies.across_ranks_reason,
            )  # fmt: skip
            if batch.rollout.sampling_logps is None:
                estimates = {
                    name: Estimate(estimate.value, reason=SAMPLED_BY_POLICY) for name, estimate in estimates.items()
                }
            no_gap = NO_REWARDS if batch.rollout.rewards is None else ctx.reasons.relative_rewards
            if no_gap:
                estimates["sampler/reward_gap"] = Estimate.missing(no_gap)
            is_known = batch.loss_settings is not None and "intervention" not in batch.loss_settings.differs
            if not is_known and batch.rollout.sampling_logps is not None:
                estimates["sampler/corrected_share"] = Estimate.missing(NO_LOSS)
            remark = self._missing_logps(ctx)
            if remark:
                estimates = {name: dataclasses.replace(e, reason=e.reason or remark) for name, e in estimates.items()}
            if batch.rollout.on_policy:  # after learning from these responses the mean need not be 1
                estimates["sampler/mean_ratio"] = _flag_truncation(estimates)
        if self.numerics:
            estimates |= self._measure_numerics(ctx)
        return Reading(measured=estimates)

    def _missing_logps(self, ctx: StepContext) -> str:
        """Return a remark on the tokens of which the sampler gave no log-probability; "" if there are none. Collective.

        Not collective if no rank has a sampler's log-probabilities.
        """
        sampling_logps, is_token = ctx.step.batch.rollout.sampling_logps, ctx.step.batch.scores.mask.bool()
        if sampling_logps is None:
            return ""
        counts = torch.stack([(sampling_logps.isnan() & is_token).sum(), is_token.sum()])
        num_missing, num_tokens = ctx.ranks.reduce(counts.double()).tolist()
        return NO_LOGP.format(share=num_missing / num_tokens) if num_missing else ""

    def _measure_numerics(self, ctx: StepContext) -> dict[str, Estimate]:
        """Return NUMERICS, between training's scores and those of rows scored one by one. Collective.

        The rows answer different prompts, so they are independent.
        """
        batch, policy = ctx.step.batch, ctx.policy
        rows = (response_index(batch.rollout.prompt_index) == 0).nonzero().squeeze(1)[:ROWS]
        mask, differences = batch.scores.mask[rows], batch.scores.logps[rows].double()
        scored = policy.run_passes(rows.split(1), lambda row: policy.scorer.score(batch.rollout, row, graph=False))
        for difference, scores in zip(differences, scored, strict=True):
            logps = scores.logps[0]
            difference[: len(logps)] -= logps
        sums = torch.stack(_token_sums(differences.masked_fill(mask == 0, 0.0), mask), dim=1)
        names = tuple(f"sampler/{name}" for name in NUMERICS)
        return estimates_over_units(names, lambda sums: sums[..., 1:] / sums[..., :1], sums, ctx.ranks.reduce)


def _flag_truncation(estimates: Mapping[str, Estimate]) -> Estimate:
    """Return the mean ratio, with the remark TRUNCATED_SAMPLER if it is below 1 for certain."""
    mean, ess = estimates["sampler/mean_ratio"], estimates["sampler/ess"]
    is_truncated = ess.value >= MIN_ESS and mean.value + mean.half_width(CERTAINTY) < 1.0 - MIN_GAP
    return dataclasses.replace(mean, reason=TRUNCATED_SAMPLER) if is_truncated else mean


def _token_sums(logs: Tensor, mask: Tensor) -> list[Tensor]:
    """Return for each sequence, (B,) each: its tokens, Σ (e^d − 1 − d), and its ratios outside [LOW, HIGH]."""
    ratios = logs.exp()
    outside = ((ratios < LOW) | (ratios > HIGH)).to(logs)
    return [mask.sum(dim=1).to(logs), (torch.expm1(logs) - logs).sum(dim=1), outside.sum(dim=1)]


def _sums_of_sequences(batch: Batch, logs: Tensor) -> Tensor:
    """Return what each sequence adds to the sums of `_statistic`, (B, 10), given log ratios to the sampler, (B, T)."""
    mask, rewards, old = batch.scores.mask, batch.rollout.rewards, batch.rollout.old_logps
    correction = None if batch.loss_settings is None else batch.loss_settings.correction
    corrected = torch.zeros_like(logs)
    if correction is not None:  # the loss corrects π_old/μ, π_old before the rollout's first step
        loss_log_ratios = logs if old is None else logs + (old - batch.scores.logps).masked_fill(mask == 0, 0.0)
        corrected = (correction.factors(loss_log_ratios) != correction.ratios(loss_log_ratios)).to(logs) * mask
    ratios = logs.sum(dim=1).exp()
    known_rewards = torch.full_like(ratios, torch.nan) if rewards is None else rewards.to(logs)
    has_reward, known_rewards = (~known_rewards.isnan()).to(logs), known_rewards.nan_to_num(nan=0.0)
    columns = [
        *_token_sums(logs, mask), corrected.sum(dim=1), torch.ones_like(ratios), ratios, ratios.square(),
        has_reward, known_rewards, ratios * has_reward, ratios * known_rewards,
    ]  # fmt: skip
    return torch.stack(columns, dim=1)


def _statistic(sums: Tensor) -> Tensor:
    """Return METRICS, (…, 6), from sums over sequences."""
    tokens, divergence, outside, corrected, number, ratio, square, *of_rewards = sums.unbind(-1)
    rewarded, reward, ratio_of_rewarded, weighted_reward = of_rewards
    gap = weighted_reward / ratio_of_rewarded - reward / rewarded
    effective = ratio.square() / (number * square)
    return torch.stack([divergence / tokens, outside / tokens, effective, ratio / number, gap, corrected / tokens], -1)

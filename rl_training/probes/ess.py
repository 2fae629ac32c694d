"""The effective sample size probe: how many of the batch's sequences this optimizer step effectively learns from.

Kish's size (statistics/kish.py) of n weights is n if all are equal, and 1 if one sequence has all the weight. The
weights are those of the Dr-GRPO gradient, Σ_i A_i Σ_k ∂log π(t_ik):

    advantage        |A_i|          A_i, the advantage of sequence i
                                    (the mean of |A| over its tokens, if their advantages differ)
    token_weight     |A_i|·T_i      T_i, its number of sampled tokens: a long sequence has more terms
    importance       π(i) / μ(i)    μ, the sampler; 1 for every sequence of an on-policy step

A truncated response that the loss leaves out (mask_truncated_completions) has A_i = 0 here, so it has no weight. If all
responses to a prompt are right, or all are wrong, their advantages are zero. `zero_advantage` is the share of such
sequences, `zero_advantage_prompts` that of such prompts. Copies of a group of responses count as one group with their
total weight. All of these describe this batch, so they have no error bar.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.engine.probe import Probe, Reading
from rl_training.statistics.estimate import DESCRIBES_STEP, Estimate
from rl_training.statistics.jackknife import NOT_FINITE
from rl_training.statistics.kish import kish_size_of_sums, kish_sums
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.reasons import NO_SAMPLING_LOGPS

NO_WEIGHT = Unavailable("no_weight", "every advantage of the step is zero, so no sequence has any weight")
NO_RATIO = Unavailable("no_ratio", "a ratio to the sampler is more than float64 can hold, or not a number")


class EffectiveSampleSizeProbe(Probe):
    """Measures how many sequences carry each optimizer step. See the module's docstring.

    Args:
        every: Measure each `every`-th step.
    """

    name = "ess"

    def measure(self, ctx: StepContext, state: Any) -> Reading:
        step = ctx.step
        batch, split = step.batch, ctx.reasons.split_prompts
        distinct = batch.copies.response
        order = batch.rollout.prompt_index.argsort()  # puts each prompt's responses next to each other
        lengths, logs = batch.rollout.completion_mask[order].sum(dim=1), batch.log_ratios()
        advantages, of_tokens = batch.rollout.advantages[order], batch.rollout.token_advantages
        if of_tokens is not None:
            advantages = of_tokens[order].abs().sum(dim=1) / lengths.clamp(min=1)
        local_zero_prompts = lengths.new_zeros(())
        if not split:  # otherwise only exact 0 counts: rounding looks like a small advantage
            by_prompt = advantages.view(-1, batch.responses_per_prompt)
            by_prompt = without_rounding(by_prompt) if of_tokens is None else by_prompt
            local_zero_prompts = (by_prompt == 0).all(dim=1).sum()
            advantages = by_prompt.flatten()
        ratio_sums = advantages.new_full((2,), torch.nan)
        if logs is not None:
            ratio_sums = kish_sums(_sum_of_copies(logs.sum(dim=1).exp(), distinct))
        of_loss = (
            _sum_of_copies(values.abs(), None if distinct is None else distinct[order])
            for values in (advantages, advantages.double() * lengths)
        )
        sizes = [ratio_sums, *map(kish_sums, of_loss)]
        zeros = torch.stack([(advantages == 0).sum(), local_zero_prompts])
        sums = ctx.ranks.reduce(torch.cat([part.double() for part in (*sizes, zeros)])).tolist()
        *size_sums, num_zero, num_zero_prompts = sums
        num_sequences, num_prompts = batch.num_sequences, ctx.num_prompts

        def estimate(value: float, reason: str | None = None) -> Estimate:
            return Estimate(math.nan if reason else value, math.nan, int(num_sequences), reason or DESCRIBES_STEP)

        importance = kish_size_of_sums(*size_sums[:2])
        no_ratios = NO_SAMPLING_LOGPS if logs is None else NO_RATIO if math.isnan(importance) else None
        no_importance = ctx.reasons.sampling_mismatch or no_ratios
        estimates = {
            "ess/zero_advantage": estimate(num_zero / num_sequences),
            "ess/zero_advantage_prompts": estimate(num_zero_prompts / (num_prompts or math.nan), split),
            "ess/importance": estimate(importance, no_importance),
        }
        for name, kish in (("ess/advantage", size_sums[2:4]), ("ess/token_weight", size_sums[4:])):
            size = kish_size_of_sums(*kish)
            reason = (NO_WEIGHT if kish[1] == 0 else NOT_FINITE) if math.isnan(size) else ""
            estimates |= {name: estimate(size, reason), f"{name}_fraction": estimate(size / num_sequences, reason)}
        return Reading(measured=estimates)


def _sum_of_copies(weights: Tensor, distinct: Tensor | None) -> Tensor:
    """Return the weights, (B,), with those of copies added up: a sequence and its copies are one.

    Args:
        weights: (B,).
        distinct: (B,), a number, equal for a sequence and its copies. None if no sequence has copies.
    """
    if distinct is None:
        return weights
    numbers, number_of_row = distinct.unique(return_inverse=True)
    return weights.new_zeros(len(numbers)).index_add_(0, number_of_row, weights)


def without_rounding(advantages: Tensor) -> Tensor:
    """Set a prompt's advantages to exactly 0 if all of them are the same number.

    A prompt's advantages add up to zero, so equal ones are zero except for rounding: eight rewards of 0.1 minus their
    mean are −7e-9 each in fp32, and would count as eight sequences of equal weight.

    Args:
        advantages: Advantages, (prompts, G).
    """
    return advantages.masked_fill((advantages == advantages[:, :1]).all(dim=1, keepdim=True), 0.0)

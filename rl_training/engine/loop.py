"""What the driver must know about a training loop: how its steps are cut, what it trains, and on which ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_training.engine.probe import Probe
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sharding import Shard
from rl_training.policy.policy import Policy
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import LossSettings
from rl_training.step.folds import DEFAULT_NUM_FOLDS, plan_folds, plan_prompt_folds
from rl_training.step.reasons import Fixes, Reasons

ONE_FOLD = Unavailable(
    "one_fold",
    "a step has only one fold, so there is no scatter between folds and none can be left out",
    fix="use {more}",
)


@dataclass(frozen=True)
class Loop:
    """What the driver must know about a training loop, once its parameters are sharded over the ranks."""

    responses_per_prompt: int
    microbatch_size: int  # sequences per forward and backward
    microbatches: int  # per optimizer step on this rank; the last step of an epoch may have fewer
    shard: Shard
    policy: Policy
    ranks: Ranks
    fixes: Fixes
    is_dr_grpo: bool = True  # by its settings, the loss is exactly Dr-GRPO's
    loss_settings: LossSettings | None = None  # at the start of training; None if unknown
    # What is known of all steps at the start of training. `reused` may hold for some steps only.
    reasons: Reasons = field(default_factory=Reasons)
    opening: str = ""  # the host's part of the announcement, which precedes what will be measured
    first_sizes: Sequence[int] = ()  # sequences in each microbatch of the first step, if not always `microbatch_size`

    @property
    def sizes(self) -> list[int]:
        """Number of sequences in each microbatch of a full step."""
        return list(self.first_sizes) or [self.microbatch_size] * self.microbatches

    def one_fold_reason(self, probes: Sequence[Probe], other_terms: Unavailable | None = None) -> Unavailable:
        """Return why a step of one fold is not enough for these probes, and what to type for more folds."""
        return ONE_FOLD.formatted(more=self.more_folds_fix(probes, other_terms))

    def more_folds_fix(self, probes: Sequence[Probe], other_terms: Unavailable | None = None) -> str:
        """Return what to type to give a step that these probes measure DEFAULT_NUM_FOLDS folds.

        Args:
            probes: What measures the step.
            other_terms: Set if the step's loss has other terms, with which folds cannot be recomputed.
        """
        size, group_size, num_ranks, fixes = (
            max(self.sizes),
            self.responses_per_prompt,
            self.ranks.count,
            self.fixes,
        )

        def num_folds_of(size: int, count: int) -> int:
            return plan_folds([size] * count, group_size, num_ranks)[-1].folds.stop

        def step_of(size: int, count: int) -> dict[str, int]:
            sequences = size * count * num_ranks
            return {"count": count, "sequences": sequences, "prompts": sequences // group_size}

        def setting(size: int, count: int) -> str:
            return fixes.batch_setting.format(size=size, **step_of(size, count))

        local_size = sum(self.sizes)
        local_prompts = local_size // group_size
        num_prompts = local_prompts * num_ranks
        # Sizes of whole prompts, or of equal parts of one.
        fitting = [n for n in range(1, size) if local_size % n == 0 and 0 in (n % group_size, group_size % n)]
        smaller = [n for n in fitting if num_folds_of(n, local_size // n) >= DEFAULT_NUM_FOLDS]
        advice = [f"smaller microbatches, {setting(smaller[-1], local_size // smaller[-1])}"] if smaller else []
        probe = next((probe for probe in probes if "num_folds" in inspect.signature(type(probe)).parameters), None)
        can_recompute = not (other_terms or self.reasons.other_terms)
        if num_prompts >= DEFAULT_NUM_FOLDS and probe is not None and can_recompute:
            num_folds = plan_prompt_folds(local_prompts, num_ranks)[-1].folds.stop
            option = fixes.num_folds_setting.format(name=probe.name, probe=type(probe).__name__, folds=num_folds)
            advice.append(f"{option}, which takes a step's forward passes and backwards once more")
        if advice:
            return ", or ".join(advice)
        new_size = math.gcd(size, group_size)
        new_count = -(-DEFAULT_NUM_FOLDS // num_ranks) * group_size // new_size
        larger = setting(new_size, new_count)
        if new_size == size:
            larger = fixes.steps_setting.format(**step_of(size, new_count))
        cost = f"{new_size * new_count / local_size:.3g} times as many responses a step"
        return f"steps of at least {DEFAULT_NUM_FOLDS} prompts, where these have {num_prompts}: {larger} ({cost})"

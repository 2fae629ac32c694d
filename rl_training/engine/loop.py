"""What the driver must know about a training loop: how its steps are cut, what it trains, and on which ranks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_training.engine.probe import Probe
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sharding import Shard
from rl_training.policy.policy import Policy
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import LossSettings
from rl_training.step.reasons import ONE_FOLD, Fixes, Reasons


@dataclass(frozen=True)
class Loop:
    """What the driver must know about a training loop, once its parameters are sharded over the ranks."""

    responses_per_prompt: int
    microbatch_size: int  # sequences per forward and backward
    microbatches: int  # per optimizer step on this rank; the last step of an epoch may have fewer
    shard: Shard
    policy: Policy
    ranks: Ranks
    is_dr_grpo: bool = True  # by its settings, the loss is exactly Dr-GRPO's
    loss_settings: LossSettings | None = None  # at the start of training; None if unknown
    # What is known of all steps at the start of training. `reused` may hold for some steps only.
    reasons: Reasons = field(default_factory=Reasons)
    fixes: Fixes = field(default_factory=Fixes)
    opening: str = ""  # the host's part of the announcement, which precedes what will be measured

    @property
    def sizes(self) -> list[int]:
        """Number of sequences in each microbatch of a full step."""
        return [self.microbatch_size] * self.microbatches

    def one_fold_reason(self, probes: Sequence[Probe]) -> Unavailable:
        """Return why a step of one fold is not enough for these probes, and what to type for more folds."""
        more = self.more_folds_fix(probes)
        return ONE_FOLD.formatted(more=more)

    def more_folds_fix(self, probes: Sequence[Probe]) -> str:
        """Return what to type to give a step that these probes measure enough folds."""
        with_num_folds = (probe for probe in probes if "num_folds" in inspect.signature(type(probe)).parameters)
        return self.fixes.more_folds_fix(
            self.responses_per_prompt,
            self.microbatch_size,
            self.microbatches,
            self.ranks.count,
            next(with_num_folds, None),
        )

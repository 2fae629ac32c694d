"""What the engine must know about a training loop: how its steps are cut, what it trains, and on which ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sharding import Shard
from rl_training.policy.policy import Policy
from rl_training.step.batch import LossSettings
from rl_training.step.reasons import Fixes, Reasons


@dataclass(frozen=True)
class LoopSpec:
    """What is known about a training loop once its parameters are sharded over the ranks."""

    responses_per_prompt: int
    microbatch_size: int  # sequences per forward and backward
    microbatches: int  # per optimizer step on this rank; the last step of an epoch may have fewer
    shard: Shard
    policy: Policy
    ranks: Ranks
    fixes: Fixes
    has_other_loss: bool = False  # by its settings, the loss is not exactly Dr-GRPO's
    loss_settings: LossSettings | None = None  # at the start of training; None if unknown
    # What is known of all steps at the start of training. `reused` may hold for some steps only.
    reasons: Reasons = field(default_factory=Reasons)
    opening: str = ""  # the host's part of the announcement, which precedes what will be measured
    first_sizes: Sequence[int] = ()  # sequences in each microbatch of the first step, if not always `microbatch_size`

    @property
    def sizes(self) -> list[int]:
        """Number of sequences in each microbatch of a full step."""
        return list(self.first_sizes) or [self.microbatch_size] * self.microbatches

    @property
    def num_prompts(self) -> int:
        """Number of whole prompts that a full step has on each rank."""
        return sum(self.sizes) // self.responses_per_prompt

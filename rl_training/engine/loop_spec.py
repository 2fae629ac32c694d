"""What the driver must know about a training loop: how its steps are cut, what it trains, and on which processes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_training.engine.probe import Probe
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sharding import Shard
from rl_training.policy.policy import Policy
from rl_training.statistics.limit import Limit
from rl_training.step.batch import LossSettings
from rl_training.step.limits import ONE_FOLD, Fixes, Limits


@dataclass(frozen=True)
class StepShape:
    """How an optimizer step of a loop is cut into microbatches."""

    responses_per_prompt: int
    microbatch_size: int  # sequences of one forward and backward
    microbatches: int  # of an optimizer step on this rank; the last step of an epoch may have fewer
    num_ranks: int

    @property
    def sizes(self) -> list[int]:
        """Sequences of each microbatch of a whole step."""
        return [self.microbatch_size] * self.microbatches


@dataclass(frozen=True)
class LoopSpec:
    """What the driver must know about a training loop, once its parameters are laid out over processes."""

    shape: StepShape
    shard: Shard
    policy: Policy
    ranks: Ranks
    dr_grpo: bool = True  # by its settings the loss is Dr-GRPO's and nothing else's
    loss_settings: LossSettings | None = None  # when training begins; None where they are not known
    # Those of all steps, as far as they are known when training begins; `reused` is one of some.
    limits: Limits = field(default_factory=Limits)
    fixes: Fixes = field(default_factory=Fixes)
    opening: str = ""  # what the host says first, before what is measured

    def one_fold_limit(self, probes: Sequence[Probe]) -> Limit:
        """Return the limit of a step of one fold that these probes measure, with what to type so that it has enough."""
        more = self.more_folds(probes)
        return ONE_FOLD.filled(more=more)

    def more_folds(self, probes: Sequence[Probe]) -> str:
        """Return what to type so that a step that these probes measure has enough folds."""
        shape = self.shape
        cutting = (probe for probe in probes if "num_folds" in inspect.signature(type(probe)).parameters)
        return self.fixes.more_folds(
            shape.responses_per_prompt, shape.microbatch_size, shape.microbatches, shape.num_ranks, next(cutting, None)
        )

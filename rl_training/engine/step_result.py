"""What a step leaves when it has ended, for hosts to log and to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.statistics.estimate import Estimate


@dataclass(frozen=True)
class StepResult:
    """What a step leaves when it has ended. Of one that was discarded, only time and costs are left."""

    seconds: float  # from the end of the previous step to the end of this one
    rollouts: Sequence[Rollout] = ()  # per microbatch on this rank
    scores: Sequence[Scores] = ()  # of each, at the parameters that the step began with
    is_measured: bool = False  # whether a probe measured the step, on all ranks
    estimates: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)  # by probe, then by name
    costs: Mapping[str, float] = field(default_factory=dict)  # of measuring it

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers to log: estimates and standard errors, nan where missing, and costs. Empty without estimates."""
        numbers: dict[str, float] = {}
        for by_name in self.estimates.values():
            for name, estimate in by_name.items():
                numbers |= {name: estimate.value, f"{name}_se": estimate.stderr}
        if self.estimates:
            numbers |= {f"probe_cost/{name}": cost for name, cost in self.costs.items()}
        return numbers

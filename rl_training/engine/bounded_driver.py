"""The driver of a loop with KL-bounded steps: it sets the learning rate before the probes see the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_training.engine.driver import StepDriver
from rl_training.engine.kl_bound import KLBound
from rl_training.engine.kl_search import BoundState
from rl_training.engine.loop import Loop
from rl_training.engine.probe import Probe
from rl_training.policy.rollout import join_rollouts
from rl_training.statistics.estimate import Estimate


class BoundedDriver(StepDriver):
    """Runs probes at optimizer steps of bounded KL. Every step is bounded, even those that no probe measures."""

    def __init__(self, probes: Sequence[Probe], bound: KLBound) -> None:
        super().__init__(probes)
        self.bound = bound
        self._bound_estimates: dict[str, Estimate] = {}  # how the current step's learning rate was set

    def start(self, loop: Loop, states: Mapping[str, Any] | None = None) -> None:
        super().start(loop, states)
        state = (states or {}).get(self.bound.name, BoundState())
        self.bound.start(loop.shard, loop.policy, loop.ranks, state)

    def initial_states(self) -> dict[str, Any]:
        return super().initial_states() | {self.bound.name: BoundState()}

    def states(self) -> dict[str, Any]:
        return super().states() | {self.bound.name: self.bound.state}

    def gradients_ready(self, rollout_number: int) -> None:
        step = self.open_step
        assert step is not None
        self.finish_backward()
        rollout = join_rollouts(step.rollouts)
        with self._isolated(), self._clock.timed(self.bound.name):
            self.bound.before_step(rollout, step.join_scores(rollout))
        super().gradients_ready(rollout_number)

    def stepped(self, was_taken: bool = True) -> None:
        if was_taken:
            with self._isolated(), self._clock.timed(self.bound.name):
                self._bound_estimates = self.bound.after_step()
        else:
            self.bound.restore()
        super().stepped(was_taken)

    def skip_step(self) -> None:
        self.bound.restore()
        super().skip_step()

    def fail_step(self) -> None:
        self.bound.restore()
        self._bound_estimates = {}
        super().fail_step()

    def finish(self) -> dict[str, dict[str, Estimate]]:
        estimates, self._bound_estimates = self._bound_estimates, {}
        return super().finish() | ({self.bound.name: estimates} if estimates else {})

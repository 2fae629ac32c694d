"""Passes on what a trainer generates: responses, their rewards, and the batch that TRL makes of them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from rl_training.engine.driver import StepDriver
from rl_training.hosts.trl.guard import Hook
from rl_training.hosts.trl.measured_trainer import MeasuredTrainer


class RolloutHooks:
    """The hooks around the methods that generate a rollout. An evaluation of the trainer's is ignored.

    Args:
        measured: The trainer.
        driver: Runs the probes.
    """

    def __init__(self, measured: MeasuredTrainer, driver: StepDriver) -> None:
        self._trainer = measured.trainer
        self._rollouts = measured.rollouts
        self._loss = measured.loss
        self._driver = driver

    def hooks(self) -> dict[str, Hook]:
        """Return the hook around each trainer method, by the method's name."""
        return {
            "_generate": self.around_generate,
            "_calculate_rewards": self.around_rewards,
            "_generate_and_score_completions": self.around_rollout,
        }

    def around_generate(self, *args: Any, **kwargs: Any) -> Generator[None, tuple, None]:
        """Take the generated responses.

        The sampling settings are read before generation too, because generation may change them.
        """
        reason_before = self._rollouts.sampling_reason()
        generated = yield
        if self._trainer.model.training:
            self._rollouts.add_generated(generated, reason_before)

    def around_rewards(self, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        """Take the rewards of the responses."""
        by_function = yield
        if self._trainer.model.training:
            self._rollouts.add_rewards(by_function)

    def around_rollout(self, *args: Any, **kwargs: Any) -> Generator[None, dict, None]:
        """Begin a rollout with the batch that TRL has made of the responses."""
        output = yield
        if not self._trainer.model.training:
            return
        with self._driver.costs.timed():  # with dropout or hidden rows it scores the rollout
            is_measured = self._driver.is_needed or bool(self._loss.interventions)
            self._rollouts.begin_rollout(output, is_measured)
        self._loss.begin_rollout(self._rollouts.read(output))

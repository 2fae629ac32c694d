"""Reports the steps of a training to the driver: when a backward has ended, and when the optimizer is about to step.

DeepSpeed's engine.step is wrapped too, because the engine steps before training_step returns. training_callback.py ends
a step, from the trainer's callbacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from rl_training.engine.driver import StepDriver
from rl_training.hosts.trl import announcements
from rl_training.hosts.trl.guard import Guard, Hook
from rl_training.hosts.trl.hooks.unseen_loss import refuse_an_unchanged_loss, warn_of_a_step_without_loss
from rl_training.hosts.trl.loop_spec import loop_spec_of
from rl_training.hosts.trl.measured_trainer import MeasuredTrainer
from rl_training.hosts.trl.wrapping import wrap


class StepHooks:
    """Begins to measure a training, and reports the phases of its steps to the driver.

    Args:
        measured: The trainer.
        driver: Runs the probes.
        guard: Runs the hooks of the optimizer.
    """

    def __init__(self, measured: MeasuredTrainer, driver: StepDriver, guard: Guard) -> None:
        self._measured = measured
        self._trainer = measured.trainer
        self._rollouts = measured.rollouts
        self._loss = measured.loss
        self._options = measured.options
        self._driver = driver
        self._guard = guard
        self._undo_optimizer = contextlib.ExitStack()

    def hooks(self) -> dict[str, Hook]:
        """Return the hook around each trainer method, by the method's name."""
        return {"training_step": self.around_training_step}

    # --- a training ---------------------------------------------------------------------------------------------------

    def begin(self, output: Path | None, states: Mapping[str, Any] | None) -> None:
        """Begin to measure a training, if anything does: start the driver, and watch the optimizer until `end`.

        Only now are parameters and optimizer final, because some launches shard them in `train()`. Records alone suit
        trainers whose shards probes cannot read.

        Args:
            output: The folder that is announced. None if there is none.
            states: The states of probes in the checkpoint that training resumes from. None starts from scratch.
        """
        if not self._driver.is_needed:
            return
        self._rollouts.mark_leftover_rollout()
        loop = loop_spec_of(self._measured, announcements.opening_line(self._driver.probes, output))
        self._driver.start(loop, states)
        if self._trainer.is_deepspeed_enabled:
            engine_step = self._guard.around(self._around_engine_step)
            wrap(self._trainer.model_wrapped, "step", engine_step, self._undo_optimizer)
        elif hasattr(loop.shard.optimizer, "_optimizer_step_pre_hooks"):  # one that skips torch's __init__ takes none
            self._undo_optimizer.callback(loop.shard.optimizer.register_step_pre_hook(self._about_to_step).remove)

    def fail(self) -> None:
        """Discard the current step, if training has ended within it."""
        self._driver.fail_step()

    def end(self) -> None:
        """Stop watching the optimizer. If training has ended within a step, discard that."""
        self.fail()
        self._undo_optimizer.close()

    def release(self) -> None:
        """Free what the ranks share, once training has ended on all of them. Collective."""
        self._driver.end()

    # --- a step -------------------------------------------------------------------------------------------------------

    def around_training_step(self, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        """Report the backward of a microbatch, and run the probes after the last one."""
        if not self._driver.has_step:
            self._driver.begin(self._trainer.state.global_step + 1)
        num_before = self._driver.num_microbatches
        try:
            yield
        except BaseException:
            self._driver.drop_backward()
            raise
        self._driver.finish_backward()
        if self._loss.interventions and self._driver.num_microbatches == num_before:
            refuse_an_unchanged_loss(self._trainer, self._options)
        self._run_probes_if_ready()

    def _around_engine_step(self, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        """Run the probes before DeepSpeed's step."""
        self._run_probes_if_ready()
        yield

    def _about_to_step(self, *args: Any) -> None:
        """Tell the driver that the optimizer is about to step."""
        self._guard.attempt(self._driver.about_to_step)

    def refuse_an_unseen_step(self) -> None:
        """Raise UserError for a step of which no gradient was seen, if it needs that: training_step was replaced."""
        is_seen = self._driver.has_step and not self._driver.awaits_gradients
        if self._options.training_needs_measurements and not is_seen:
            refuse_an_unchanged_loss(self._trainer, self._options)

    def stepped(self) -> None:
        """Tell the driver that the optimizer has stepped."""
        self._driver.stepped()

    def _run_probes_if_ready(self) -> None:
        """Run the probes if all gradients of the step are complete. Skip a step of which no loss was seen."""
        if not self._trainer.accelerator.sync_gradients or not self._driver.awaits_gradients:
            return
        if self._driver.num_microbatches:
            self._driver.gradients_ready(self._rollouts.current.number)
            return
        if self._options.training_needs_measurements:
            refuse_an_unchanged_loss(self._trainer, self._options)
        warn_of_a_step_without_loss(self._trainer)
        self._driver.skip_step()

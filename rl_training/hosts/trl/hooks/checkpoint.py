"""Adds two things to the trainer's checkpoints: the states of the probes, and the run that they belong to."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from rl_training.engine.driver import StepDriver
from rl_training.hosts.trl.guard import Guard, Hook
from rl_training.hosts.trl.training import Resumed
from rl_training.hosts.trl.versions import argument_of
from rl_training.parallel.ranks import all_ranks
from rl_training.records.checkpoint_states import load_probe_states, read_notes, save_probe_states


class CheckpointHooks:
    """The hooks around the methods that save and load a trainer's checkpoint.

    Args:
        trainer: The trainer.
        driver: Has the states of the probes.
        guard: Knows the current training, and whether its measuring has ended.
    """

    def __init__(self, trainer: GRPOTrainer, driver: StepDriver, guard: Guard) -> None:
        self._trainer = trainer
        self._driver = driver
        self._guard = guard

    def hooks(self) -> dict[str, Hook]:
        """Return the hook around each trainer method, by the method's name. They run even if measuring has ended."""
        return {
            # The probes' states, from every rank, are in the checkpoint before trainer_state.json completes it.
            "_save_optimizer_and_scheduler": self.around_save,
            "_save_rng_state": self.around_save_rng_state,
            "_load_optimizer_and_scheduler": self.around_load,
        }

    def around_save(self, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        """Add the probes' states to a checkpoint. Once measuring has ended, the checkpoint still names its run."""
        yield
        checkpoint = Path(argument_of("output_dir", "_save_optimizer_and_scheduler", args, kwargs))
        self._guard.attempt(lambda: self._save(self._driver.states(), checkpoint))
        if self._guard.reason:  # perhaps just now
            with contextlib.suppress(Exception):
                self._save({}, checkpoint)

    def _save(self, states: Mapping[str, Any], checkpoint: Path) -> None:
        ranks = all_ranks()
        save_probe_states(states, checkpoint, ranks.count, ranks.number, self._guard.training.run_id)

    def around_save_rng_state(self, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        yield
        self._trainer.accelerator.wait_for_everyone()  # the main process now writes trainer_state.json

    def around_load(self, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        """Load the run of a checkpoint and the probes' states. A training without these states still knows its run."""
        yield
        checkpoint = argument_of("checkpoint", "_load_optimizer_and_scheduler", args, kwargs)
        if checkpoint is not None:
            training = self._guard.training
            training.resumed = Resumed(read_notes(Path(checkpoint)).get("run", ""))
            states = load_probe_states(self._driver.initial_states(), Path(checkpoint))
            training.resumed = dataclasses.replace(training.resumed, states=states)

"""Adds two things to the trainer's checkpoints: the states of the probes, and the run that they belong to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from rl_training.engine.driver import StepDriver
from rl_training.hosts.trl.guard import Guard
from rl_training.parallel.ranks import all_ranks
from rl_training.records.checkpoint_states import load_probe_states, read_notes, save_probe_states


@dataclass(frozen=True)
class Resumed:
    """What a training resumes: contents of a checkpoint, or nothing."""

    run_id: str = ""  # id of the training that the checkpoint belongs to; "" if it has none
    states: Mapping[str, Any] | None = None  # states of the probes, by name; None without a checkpoint


class CheckpointHooks:
    """Wraps the methods that save and load a trainer's checkpoint."""

    def __init__(self, trainer: GRPOTrainer, driver: StepDriver, guard: Guard) -> None:
        self._trainer, self._driver, self._guard = trainer, driver, guard
        self.run_id = ""  # of the training, written to checkpoints
        self._resumed = Resumed()  # what was loaded for the training that is about to begin

    def take_resumed(self) -> Resumed:
        """Return what was loaded for the training that is about to begin, once."""
        resumed, self._resumed = self._resumed, Resumed()
        return resumed

    def wrappers(self) -> dict[str, Callable[..., object]]:
        """Return the wrapper of each wrapped trainer method, by the method's name."""
        return {
            # The probes' states, from every rank, are in the checkpoint before trainer_state.json completes it.
            "_save_optimizer_and_scheduler": self._on_save,
            "_save_rng_state": self._on_save_rng_state,
            "_load_optimizer_and_scheduler": self._on_load,
        }

    def _on_save(self, original: Callable[..., Any], output_dir: str, *args: Any, **kwargs: Any) -> Any:
        result = original(output_dir, *args, **kwargs)
        self._guard.attempt(lambda: self._save(self._driver.states(), Path(output_dir)))
        if self._guard.reason:  # measuring has ended, perhaps just now: the checkpoint still names its run
            with contextlib.suppress(Exception):
                self._save({}, Path(output_dir))
        return result

    def _save(self, states: Mapping[str, Any], checkpoint: Path) -> None:
        ranks = all_ranks()
        save_probe_states(states, checkpoint, ranks.count, ranks.number, self.run_id)

    def _on_save_rng_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._trainer.accelerator.wait_for_everyone()  # the main process now writes trainer_state.json
        return result

    def _on_load(self, original: Callable[..., Any], checkpoint: str | None, *args: Any, **kwargs: Any) -> Any:
        result = original(checkpoint, *args, **kwargs)
        if checkpoint is not None:
            states = load_probe_states(self._driver.initial_states(), Path(checkpoint))
            self._resumed = Resumed(read_notes(Path(checkpoint)).get("run", ""), states)
        return result

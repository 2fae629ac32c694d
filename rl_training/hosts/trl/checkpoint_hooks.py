"""What a trainer's checkpoints keep of an attachment: the states of the probes, and which run they belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trl import GRPOTrainer

from rl_training.hosts.trl.guard import Guard
from rl_training.parallel.ranks import all_ranks
from rl_training.records.checkpoint_states import NamedStateful, about, load_probe_states, save_probe_states


class CheckpointHooks:
    """Wraps the methods that save and load a trainer's checkpoint.

    resumed_run  name of the folder of the run whose checkpoint was loaded for the training that is about to begin; ""
                 where the checkpoint does not say; None: none was loaded
    """

    def __init__(
        self, trainer: GRPOTrainer, stateful: Sequence[NamedStateful], reset: Callable[[], None], guard: Guard
    ) -> None:
        self._trainer, self._stateful, self._reset, self._guard = trainer, stateful, reset, guard
        self.run_name = ""  # noted in checkpoints
        self.resumed_run: str | None = None

    def wrappers(self) -> dict[str, Callable[..., object]]:
        """Return what wraps which method of the trainer."""
        return {
            # The probes' state is in the checkpoint before it counts as complete, and so is every process's part.
            "_save_optimizer_and_scheduler": self._on_save,
            "_save_rng_state": self._on_save_rng_state,
            "_load_optimizer_and_scheduler": self._on_load,
        }

    def _on_save(self, original: Callable[[str], None], output_dir: str) -> None:
        original(output_dir)
        ranks = all_ranks()
        stateful = [] if self._guard.reason else self._stateful  # in the middle of the step that has failed
        with self._guard.watching():
            save_probe_states(stateful, Path(output_dir), ranks.count, ranks.number, self.run_name)

    def _on_save_rng_state(self, original: Callable[[str], None], output_dir: str) -> None:
        original(output_dir)
        self._trainer.accelerator.wait_for_everyone()  # the main process now writes trainer_state.json

    def _on_load(self, original: Callable[[str | None], None], checkpoint: str | None) -> None:
        original(checkpoint)
        if checkpoint is not None:
            self._reset()
            load_probe_states(self._stateful, Path(checkpoint))
            self.resumed_run = about(Path(checkpoint)).get("run", "")

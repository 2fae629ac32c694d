"""The folder of an evaluation's results: locked, for one set of settings, with the results of each checkpoint."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rl_training.errors import UserError
from rl_training.evaluation.responses import Response
from rl_training.job.configuration.nested import describe_differences
from rl_training.job.evaluation.spec import EvaluationSpec
from rl_training.job.evaluation.spelling import Spelling
from rl_training.job.evaluation.worker import CheckpointResponses
from rl_training.records.checkpoint_states import checksum
from rl_training.records.evaluated import (
    EVALUATION_SETTINGS_FILE,
    consolidate,
    read_step,
    store_settings_once,
    write_step,
)
from rl_training.records.files.limited import MAX_STATE_BYTES, read_bytes
from rl_training.records.files.lock import locked
from rl_training.records.folder import EVALUATIONS, TRAINER_STATE_FILE
from rl_training.statistics.estimate import Estimate


class ResultFolder:
    """The folder ROOT/evaluations/NAME, in which checkpoints that were evaluated with the same settings share a table.

    Args:
        root: The folder that holds evaluations/.
        name: Name of the evaluation.
        spec: What is evaluated.
        spelling: How the user types options, for errors.

    Raises:
        UserError: The name cannot be used.
    """

    def __init__(self, root: Path, name: str, spec: EvaluationSpec, spelling: Spelling) -> None:
        if not name or "/" in name or name.startswith("."):  # overwriting removes this folder
            raise UserError(f"{spelling.option('name', name)} names a folder: use letters, digits and dashes")
        self.path = root / EVALUATIONS / name
        self._spec = spec
        self._spelling = spelling
        self._fingerprints: dict[int, str] = {}  # by step, from before the evaluation

    def locked(self) -> AbstractContextManager[None]:
        """Return a context that locks the folder of all evaluations, which the command and Python's `evaluate` share.

        The run folder's own lock belongs to its training, which may go on meanwhile.
        """
        return locked(self.path.parent, self._spelling.other_folder)

    def start(self) -> dict[int, Path]:
        """Create the folder, and return the checkpoints to evaluate, by step. Call it while the folder is locked.

        Raises:
            UserError: If it contains results with other settings.
        """
        if self._spec.options.overwrite:
            shutil.rmtree(self.path, ignore_errors=True)
        elif not any(self.path.glob("step_*")):
            # Without results, the old settings do not matter.
            (self.path / EVALUATION_SETTINGS_FILE).unlink(missing_ok=True)
        before = store_settings_once(self.path, self._spec.compared)
        if changed := describe_differences(before, self._spec.compared):
            option = self._spelling.option
            raise UserError(
                f"{self.path} was made with other settings: {changed}. Write this one beside it with "
                f"{option('name', 'NAME')}, or replace it with {option('overwrite', self._spelling.true)}"
            )
        return self.pending()

    def pending(self) -> dict[int, Path]:
        """Return the checkpoints to evaluate, by step: new, failed, overwritten, or with a metric that failed."""
        pending = {}
        for step, checkpoint in self._spec.checkpoints.items():
            self._fingerprints[step] = fingerprint(checkpoint)
            result = None if self._spec.options.overwrite else read_step(self.path, step)
            if result is None or result.get("errors") or result.get("fingerprint") != self._fingerprints[step]:
                pending[step] = checkpoint
        return pending

    def write(
        self, step: int, result: CheckpointResponses, metrics: Mapping[str, Estimate], errors: Sequence[str]
    ) -> None:
        """Write the numbers and the responses of one checkpoint that was pending, and the table of all.

        Args:
            step: Step of the checkpoint.
            result: The responses.
            metrics: The numbers.
            errors: Why metrics of the user's own are missing.

        Raises:
            UserError: If the disk is full; names the file.
        """
        checkpoint = self._spec.checkpoints[step]
        about = {
            "checkpoint": str(checkpoint),
            "fingerprint": self._fingerprints[step],
            "errors": [*errors],
            "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
        }
        prompts = {row: self._spec.task.held_out[row]["prompt"] for row in self._spec.rows}
        responses = sorted(result.responses, key=lambda r: (r.row, not r.is_greedy, r.number))
        lines = [_line(response, prompts[response.row]) for response in responses]
        write_step(self.path, step, about, metrics, lines, self._spec.options.gzip)
        consolidate(self.path)


def fingerprint(checkpoint: Path) -> str:
    """Return a fingerprint that distinguishes a checkpoint from a later one in the same folder.

    It hashes the trainer's state, whose log contains the timings of each step, and the sizes of the weight files. A
    checkpoint of another trainer may have no such state: then it hashes the contents of these files.
    """
    state = checkpoint / TRAINER_STATE_FILE
    if state.is_file():
        weights: list[tuple[str, Any]] = [(p.name, p.stat().st_size) for p in checkpoint.glob("*.safetensors")]
        digest = hashlib.sha256(read_bytes(state, MAX_STATE_BYTES))
    else:
        files = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.bin")]
        weights = [(path.name, checksum(path)) for path in files if path.is_file()]
        digest = hashlib.sha256()
    digest.update(repr(sorted(weights)).encode())
    return digest.hexdigest()


def _line(response: Response, prompt: Any) -> dict[str, Any]:
    """Return the line of responses.jsonl for a response. Means are over its tokens, in nats."""
    return {
        "row": response.row,
        "response_index": "greedy" if response.is_greedy else response.number,
        "prompt": prompt,
        "response": response.text,
        "reward": response.reward,
        "answer": response.answer,
        "length": response.length,
        "truncated": response.truncated,
        "mean_logp": float(response.logps.mean()),
        "mean_entropy": float(response.entropies.mean()),
        "mean_kl": None if response.kl is None else float(response.kl.mean()),
    }

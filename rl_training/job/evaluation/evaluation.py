"""An evaluation of checkpoints: what is done with the responses of each, wherever they were generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from rl_training.errors import UserError, one_line
from rl_training.evaluation.metrics import custom_metrics, group_by_row, response_metrics
from rl_training.job.evaluation.announcements import RunAnnouncements, print_table
from rl_training.job.evaluation.progress import EvaluationProgress
from rl_training.job.evaluation.result_folder import ResultFolder
from rl_training.job.evaluation.spec import EvaluationSpec
from rl_training.job.evaluation.worker import CheckpointResponses
from rl_training.records.files.masking import mask_line
from rl_training.records.files.printable import printable


@dataclass(frozen=True)
class Evaluation:
    """An evaluation, with the places that its results go to. Only the main process calls `finish` and `close`."""

    spec: EvaluationSpec
    folder: ResultFolder
    announcements: RunAnnouncements
    problems: list[str] = field(default_factory=list, init=False)  # what failed, and why

    def progress(self, pending: Mapping[int, Path], num_shares: int = 1, shown: bool = True) -> EvaluationProgress:
        """Return a bar of the responses that the main process, one of `num_shares`, makes for these checkpoints."""
        share = sum(map(len, self.spec.batches(0, num_shares)))
        num_finished = len(self.spec.checkpoints) - len(pending)
        return EvaluationProgress(len(pending) * share, len(self.spec.checkpoints), num_finished, shown)

    def finish(self, step: int, result: CheckpointResponses) -> None:
        """Measure and write the result of one checkpoint. A failure is reported and affects only this checkpoint."""
        reason = result.reason
        if not reason:
            try:
                self._measure_and_write(step, result)
            except UserError as error:
                reason = one_line(error)
        if reason:
            self._report(f"step {step} failed: {reason} ({self.spec.checkpoints[step]})")

    def close(self) -> None:
        """Print the table and what failed, close the dashboards and rewrite the run's report."""
        print_table(self.folder.path, self.problems)
        self.announcements.close()

    def _measure_and_write(self, step: int, result: CheckpointResponses) -> None:
        options = self.spec.options
        task = self.spec.task
        can_read = task.given_answer is not None
        metrics = response_metrics(result.responses, options.max_k, options.right_reward, can_read, task.reward_range)
        sampled, _ = group_by_row(result.responses)
        errors = []
        for name, metric in self.spec.metrics.items():
            try:
                metrics |= custom_metrics(name, metric, sampled, task.held_out)
            except UserError as error:
                errors.append(mask_line(str(error)))
                self._report(f"step {step}: {error}")
        self.folder.write(step, result, metrics, errors)
        self.announcements.add(step, metrics)

    def _report(self, problem: str) -> None:
        problem = printable(mask_line(problem))
        self.problems.append(problem)
        tqdm.write(problem)

"""The results of an evaluation: measures the responses of each checkpoint; writes, logs and shows the numbers."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from tqdm import tqdm

from rl_training.errors import UserError
from rl_training.evaluation.metrics import BUILT_IN, Metric, custom_metrics, group_by_row, response_metrics
from rl_training.evaluation.responses import Batch, Response, choose_rows, make_batches
from rl_training.evaluation.workers import reason_of
from rl_training.job.configuration.nested import describe_differences
from rl_training.job.configuration.stored import unmarked
from rl_training.job.objects.dashboards import MetricsLogger, loggers_of
from rl_training.job.run.evaluation_worker import CheckpointResponses
from rl_training.job.run.progress import EvaluationProgress
from rl_training.limited_files import MAX_STATE_BYTES, read_bytes
from rl_training.records.evaluated import (
    EVALUATION_SETTINGS_FILE,
    TABLE_FILE,
    consolidate,
    estimates_in,
    largest_pass_at,
    read_step,
    read_table,
    write_settings,
    write_step,
)
from rl_training.records.files.lock import locked
from rl_training.records.files.masking import mask_line
from rl_training.records.files.printable import printable
from rl_training.records.folder import EVALUATIONS
from rl_training.records.jsonl import has_records
from rl_training.records.report import write_report
from rl_training.records.report.writing import format_estimate
from rl_training.statistics.estimate import Estimate
from rl_training.tasks.task import Task

# Column titles of the table in the terminal, by metric.
COLUMNS = {
    "reward": "reward", "greedy_accuracy": "greedy", "pass_at": "pass@{}", "majority": "majority",
    "entropy/token": "entropy/token", "kl/token": "KL/token", "length": "length",
}  # fmt: skip
OUTPUT_HINT = "give another folder with output=FOLDER"
# Options that affect how a result is computed or stored, but not the result.
NOT_COMPARED = ("name", "batch_size", "gzip", "overwrite")


@dataclass
class Evaluation:
    """An evaluation of checkpoints. Only the main process calls `start` and what follows it.

    Raises:
        UserError: The name or a metric's name cannot be used, or there are no prompts.
    """

    root: Path  # the folder that holds evaluations/
    name: str  # of its folder in evaluations/
    checkpoints: dict[int, Path]  # by step, in order
    task: Task
    metrics: Mapping[str, Metric]  # the user's own
    options: DictConfig  # `evaluation` of conf/evaluate.yaml, with a temperature and a length
    settings: dict[str, Any]  # must be equal too for results to share a table; contains no secrets
    run: Path | None = None  # whose dashboards and report get the numbers
    config: Mapping[str, Any] = field(default_factory=dict)  # of the run
    prefix: str = ""  # of metric names in dashboards
    ways_out: tuple[str, str] = ("evaluation.name=NAME", "evaluation.overwrite=true")  # what to type if settings differ
    rows: tuple[int, ...] = field(init=False)  # of the evaluation split, whose prompts are answered
    problems: list[str] = field(default_factory=list, init=False)  # what failed, and why
    _loggers: list[MetricsLogger] | None = field(default=None, init=False)  # None until the first numbers

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):  # overwriting removes this folder
            setting = self.ways_out[0].partition("=")[0]
            raise UserError(f"{setting}={self.name} names a folder: use letters, digits and dashes")
        for metric in self.metrics:
            if metric in BUILT_IN:
                raise UserError(f"metrics.{metric}: there is a built-in metric {metric}; give yours another name")
        self.rows = choose_rows(len(self.task.held_out), self.options.fraction, self.options.seed)

    @property
    def folder(self) -> Path:
        return self.root / EVALUATIONS / self.name

    @property
    def compared(self) -> dict[str, Any]:
        """All settings that must be equal for results to share a table."""
        return {str(key): value for key, value in self.options.items() if key not in NOT_COMPARED} | self.settings

    def batches(self, share: int = 0, num_shares: int = 1) -> list[Batch]:
        """Return the batches of process number `share` out of `num_shares`."""
        options = self.options
        batches = make_batches(self.rows, options.responses_per_prompt, options.greedy, options.batch_size)
        return batches[share::num_shares]

    def pending(self) -> dict[int, Path]:
        """Return the checkpoints to evaluate, by step: new, failed, overwritten, or with a metric that failed."""
        pending = {}
        for step, checkpoint in self.checkpoints.items():
            result = None if self.options.overwrite else read_step(self.folder, step)
            if result is None or result.get("errors") or result.get("fingerprint") != fingerprint(checkpoint):
                pending[step] = checkpoint
        return pending

    def locked(self) -> AbstractContextManager[None]:
        """Return a context that locks the folder of evaluations, which the command and Python's `evaluate` share.

        The run folder's own lock belongs to its training, which may go on meanwhile.
        """
        return locked(self.folder.parent, OUTPUT_HINT)

    def start(self) -> dict[int, Path]:
        """Create the evaluation's folder, and return the checkpoints to evaluate, by step.

        Raises:
            UserError: If a folder of this name contains results with other settings.
        """
        if self.options.overwrite:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif not any(self.folder.glob("step_*")):
            # Without results, the old settings do not matter.
            (self.folder / EVALUATION_SETTINGS_FILE).unlink(missing_ok=True)
        before = write_settings(self.folder, self.compared)
        if changed := describe_differences(before, self.compared):
            raise UserError(
                f"{self.folder} was made with other settings: {changed}. Write this one beside it with "
                f"{self.ways_out[0]}, or replace it with {self.ways_out[1]}"
            )
        return self.pending()

    def progress(self, pending: Mapping[int, Path], num_shares: int = 1, shown: bool = True) -> EvaluationProgress:
        """Return a bar of the responses that the main process, one of `num_shares`, makes for these checkpoints."""
        share = sum(map(len, self.batches(0, num_shares)))
        num_finished = len(self.checkpoints) - len(pending)
        return EvaluationProgress(len(pending) * share, len(self.checkpoints), num_finished, shown)

    def finish(self, step: int, result: CheckpointResponses) -> None:
        """Measure and write the result of one checkpoint. A failure is reported and affects only this checkpoint."""
        reason = result.reason
        if not reason:
            try:
                self._write(step, result)
            except UserError as error:
                reason = reason_of(error)
        if reason:
            self._report(f"step {step} failed: {reason} ({self.checkpoints[step]})")

    def _report(self, problem: str) -> None:
        problem = printable(mask_line(problem))
        self.problems.append(problem)
        tqdm.write(problem)

    def _write(self, step: int, result: CheckpointResponses) -> None:
        options = self.options
        dataset = self.task.held_out
        max_k = options.k or options.responses_per_prompt
        can_read = self.task.given_answer is not None
        metrics = response_metrics(result.responses, max_k, options.right_reward, can_read, self.task.reward_range)
        sampled, _ = group_by_row(result.responses)
        errors = []
        for name, metric in self.metrics.items():
            try:
                metrics |= custom_metrics(name, metric, sampled, dataset)
            except UserError as error:
                errors.append(mask_line(str(error)))
                self._report(f"step {step}: {error}")
        about = {
            "checkpoint": str(self.checkpoints[step]),
            "fingerprint": fingerprint(self.checkpoints[step]),
            "errors": errors,
            "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
        }
        prompts = {row: dataset[row]["prompt"] for row in self.rows}
        responses = sorted(result.responses, key=lambda r: (r.row, not r.is_greedy, r.number))
        lines = [_line(response, prompts[response.row]) for response in responses]
        write_step(self.folder, step, about, metrics, lines, options.gzip)
        consolidate(self.folder)
        self._log(step, metrics)

    def _log(self, step: int, metrics: Mapping[str, Estimate]) -> None:
        if self._loggers is None:
            self._loggers = [] if self.run is None else loggers_of(self.run, unmarked(self.config))
            for dashboard in self._loggers:
                dashboard.start(after_step=0)
        named = {f"{self.prefix}{name}": e for name, e in metrics.items()}
        numbers = {name: e.value for name, e in named.items()} | {f"{name}_se": e.stderr for name, e in named.items()}
        for dashboard in self._loggers:
            dashboard.log(step, {name: value for name, value in numbers.items() if value == value})

    def close(self) -> int:
        """Print the table, close the dashboards, rewrite the run's report and return the exit code."""
        print_table(self.folder, self.problems)
        for dashboard in self._loggers or []:
            dashboard.finish(pictures=[])
        run = self.run
        if self._loggers is not None and run is not None and has_records(run):
            print(f"Report: {write_report(run)}")
        return 1 if self.problems else 0


def fingerprint(checkpoint: Path) -> str:
    """Return a fingerprint that distinguishes a checkpoint from a later one in the same folder.

    It hashes the trainer's state, whose log contains the timings of each step, and the sizes of the weight files.
    """
    digest = hashlib.sha256()
    state = checkpoint / "trainer_state.json"
    if state.is_file():
        digest.update(read_bytes(state, MAX_STATE_BYTES))
    digest.update(repr(sorted((p.name, p.stat().st_size) for p in checkpoint.glob("*.safetensors"))).encode())
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


def print_table(folder: Path, problems: Sequence[str]) -> None:
    """Print one line per checkpoint, with pass@k for the largest k, followed by what failed and why."""
    table = read_table(folder)
    largest_k = (largest_pass_at(table["metric"]) or "pass_at_1").removeprefix("pass_at_")
    titles = {
        name.replace("pass_at", f"pass_at_{largest_k}"): title.format(largest_k) for name, title in COLUMNS.items()
    }
    shown = table[table["metric"].isin([*titles]) & np.isfinite(table["value"].astype(float))]
    if len(shown):
        cells = shown.assign(title=shown["metric"].map(titles), cell=[*map(format_estimate, estimates_in(shown))])
        pivoted = cells.pivot(index="step", columns="title", values="cell").fillna("–").reset_index()
        prompts = shown["num_prompts"].max()
        name = printable(folder.name)
        print(f"{name}: mean ± half of the 95 % interval, or the interval itself, over {prompts:.0f} prompts")
        print(pivoted[["step", *(title for title in titles.values() if title in pivoted)]].to_string(index=False))
        print(f"All numbers: {folder / TABLE_FILE}")
    for problem in problems:
        print(problem)

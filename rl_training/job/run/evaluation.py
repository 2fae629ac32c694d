"""Evaluates each checkpoint in a separate process; measures, writes, logs and shows the results.

Several processes (accelerate launch, torchrun) work on one checkpoint at a time, each on its share of the batches; the
main process measures and writes. A single process evaluates `evaluation.jobs` checkpoints in parallel.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from omegaconf import DictConfig
from tqdm import tqdm

from rl_training.errors import UserError
from rl_training.evaluation.metrics import custom_metrics, group_by_row, response_metrics
from rl_training.evaluation.responses import GREEDY, Response
from rl_training.evaluation.workers import reason_of
from rl_training.hosts.trl.run_folder import on_main_process
from rl_training.job.configuration.stored import unmarked
from rl_training.job.objects.dashboards import MetricsLogger, loggers_of
from rl_training.job.run.evaluation_plan import (
    CheckpointResponses,
    EvaluationPlan,
    fingerprint,
    merge_results,
    read_plan,
    run_worker,
)
from rl_training.records.evaluated import TABLE_FILE, consolidate, estimates_in, largest_pass_at, read_table, write_step
from rl_training.records.files.lock import locked
from rl_training.records.files.masking import mask_line
from rl_training.records.files.printable import printable
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.report import write_report
from rl_training.records.report.writing import format_estimate
from rl_training.statistics.estimate import Estimate

# Column titles of the table in the terminal, by metric.
COLUMNS = {
    "reward": "reward", "greedy_accuracy": "greedy", "pass_at": "pass@{}", "majority": "majority",
    "entropy/token": "entropy/token", "kl/token": "KL/token", "length": "length",
}  # fmt: skip
OUTPUT_HINT = "give another folder with output=FOLDER"
PATIENCE = timedelta(days=7)  # how long processes wait for the slowest one


def evaluate(cfg: DictConfig) -> int:
    """Evaluate the checkpoints that the configuration names.

    Returns:
        The exit code: 0, or 1 if a checkpoint or a metric failed.

    Raises:
        UserError: For every mistake in the configuration.
    """
    plan = read_plan(cfg)
    state = PartialState(cpu=True, timeout=PATIENCE)  # on the CPU: worker processes do the work, these only communicate
    if plan.options.jobs > 1 and state.num_processes > 1:
        raise UserError("evaluation.jobs is for one process: several processes share the rows of each checkpoint")
    evaluation: Evaluation | None = None
    with contextlib.ExitStack() as lock:

        def start() -> dict[int, Path]:
            nonlocal evaluation
            lock.enter_context(locked(plan.folder.parent, OUTPUT_HINT))
            plan.start()
            evaluation = Evaluation(plan, state.num_processes)
            return evaluation.pending

        _evaluate_all(plan, on_main_process(start), evaluation)
        code = evaluation.close() if evaluation else 0
    return on_main_process(lambda: code)


def _evaluate_all(plan: EvaluationPlan, pending: dict[int, Path], evaluation: Evaluation | None) -> None:
    """Evaluate the pending checkpoints, `jobs` at once. Collective.

    Args:
        plan: What to evaluate.
        pending: Checkpoints to evaluate, by step.
        evaluation: Receives the results on the main process; None on the others.
    """
    state, devices, stopped = PartialState(), queue.SimpleQueue[str](), threading.Event()
    for job in range(plan.options.jobs):
        devices.put(_device(state.local_process_index + job))

    def on_responses(num_responses: int) -> None:
        if stopped.is_set():  # this worker was still starting when the others were killed
            raise RuntimeError("stopped")
        if evaluation:
            evaluation.bar.update(num_responses)

    def evaluate_checkpoint(step: int) -> tuple[int, CheckpointResponses]:
        device = devices.get()
        result = run_worker(plan, pending[step], device, state.process_index, state.num_processes, on_responses)
        devices.put(device)
        return step, merge_results(gather_object([result]))

    with ThreadPool(plan.options.jobs) as pool:
        try:
            for step, result in pool.imap_unordered(evaluate_checkpoint, pending):
                if evaluation:
                    evaluation.finish(step, result)
        except BaseException:  # Ctrl-C, for example: do not wait for unfinished work
            stopped.set()
            for process in multiprocessing.active_children():
                process.kill()
            raise
        finally:
            if evaluation:
                evaluation.bar.close()


class Evaluation:
    """The main process's part of an evaluation: progress bar, files, dashboards and table.

    Args:
        plan: What to evaluate.
        num_shares: Number of processes that share the batches of each checkpoint.
    """

    def __init__(self, plan: EvaluationPlan, num_shares: int) -> None:
        self.plan = plan
        self.task = plan.task()
        self.custom = plan.custom_metrics()
        self.pending = plan.pending()
        self.problems: list[str] = []  # what failed, and why
        self.loggers: list[MetricsLogger] | None = None
        self.num_finished = len(plan.checkpoints) - len(self.pending)
        share = sum(map(len, plan.batches(0, num_shares)))
        every = 0.2 if sys.stderr.isatty() else 10.0  # seconds between two updates of the bar
        self.bar = tqdm(total=len(self.pending) * share, unit="response", mininterval=every, maxinterval=every)
        self._show_finished()

    def finish(self, step: int, result: CheckpointResponses) -> None:
        """Measure and write the result of one checkpoint. A failure is reported and affects only this checkpoint."""
        reason = result.reason
        if not reason:
            try:
                self._write(step, result)
            except UserError as error:
                reason = reason_of(error)
        if reason:
            self._report(f"step {step} failed: {reason} ({self.plan.checkpoints[step]})")
        self.num_finished += 1
        self._show_finished()

    def _show_finished(self) -> None:
        self.bar.set_description(f"{self.num_finished} of {len(self.plan.checkpoints)} checkpoints")

    def _report(self, problem: str) -> None:
        problem = printable(mask_line(problem))
        self.problems.append(problem)
        tqdm.write(problem)

    def _write(self, step: int, result: CheckpointResponses) -> None:
        plan, checkpoint = self.plan, self.plan.checkpoints[step]
        can_read = self.task.given_answer is not None
        max_k = plan.options.k or plan.options.responses_per_prompt
        right = plan.options.right_reward
        metrics = response_metrics(result.responses, max_k, right, can_read, self.task.reward_range)
        sampled, _ = group_by_row(result.responses)
        errors = []
        for name, metric in self.custom.items():
            try:
                metrics |= custom_metrics(name, metric, sampled, self.task.eval_dataset)
            except UserError as error:
                errors.append(mask_line(str(error)))
                self._report(f"step {step}: {error}")
        about = {
            "checkpoint": str(checkpoint),
            "fingerprint": fingerprint(checkpoint),
            "errors": errors,
            "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
        }
        responses = sorted(result.responses, key=lambda r: (r.row, r.number))
        rows = {row: self.task.eval_dataset[row] for row in plan.rows}
        lines = [_line(response, rows[response.row]["prompt"]) for response in responses]
        write_step(plan.folder, step, about, metrics, lines, plan.options.gzip)
        consolidate(plan.folder)
        self._log(step, metrics)

    def _log(self, step: int, metrics: dict[str, Estimate]) -> None:
        if self.loggers is None:
            self.loggers = [] if self.plan.run is None else loggers_of(self.plan.run, unmarked(self.plan.config))
            for dashboard in self.loggers:
                dashboard.start(after_step=0)
        named = {f"{self.plan.prefix}{name}": e for name, e in metrics.items()}
        numbers = {name: e.value for name, e in named.items()} | {f"{name}_se": e.stderr for name, e in named.items()}
        for dashboard in self.loggers:
            dashboard.log(step, {name: value for name, value in numbers.items() if value == value})

    def close(self) -> int:
        """Print the table, close the dashboards, rewrite the run's report and return the exit code."""
        print_table(self.plan.folder, self.problems)
        for dashboard in self.loggers or []:
            dashboard.finish(pictures=[])
        run = self.plan.run
        if self.loggers is not None and run is not None and (run / LOGS_FOLDER / METRICS_FILE).is_file():
            print(f"Report: {write_report(run)}")
        return 1 if self.problems else 0


def _device(number: int) -> str:
    """Return the device for the job with this number: its own GPU if there are enough, otherwise a shared one."""
    return f"cuda:{number % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"


def _line(response: Response, prompt: Any) -> dict[str, Any]:
    """Return the line of responses.jsonl for a response. Means are over its tokens, in nats."""
    return {
        "row": response.row,
        "response_index": "greedy" if response.number == GREEDY else response.number,
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

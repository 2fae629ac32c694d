"""Evaluates the checkpoints that `rl-training evaluate` names, each in a separate process.

Several processes (accelerate launch, torchrun) work on one checkpoint at a time, each on its share of the batches; the
main process measures and writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from rl_training.hosts.trl.output.run_folder import on_main_process
from rl_training.job.configuration.prepare import PreparedEvaluation
from rl_training.job.evaluation.evaluation import Evaluation
from rl_training.job.evaluation.request import Request, read_request
from rl_training.job.evaluation.worker import Work, merge_results

PATIENCE = timedelta(days=7)  # how long processes wait for the slowest one


def evaluate_run_checkpoints(prepared: PreparedEvaluation) -> list[str]:
    """Evaluate the checkpoints that the settings name, write the results and print a table. Collective.

    Returns:
        Why checkpoints or metrics failed, in one line each. The others are evaluated.

    Raises:
        UserError: If the settings name no checkpoint or task, or another evaluation writes to the folder.
    """
    request = read_request(prepared)
    state = PartialState(cpu=True, timeout=PATIENCE)  # on the CPU: worker processes do the work, these only communicate
    with contextlib.ExitStack() as lock:
        pending = on_main_process(lambda: _begin(request.evaluation, lock))
        _evaluate_all(request, pending, state)
        return on_main_process(lambda: _end(request.evaluation))


def _begin(evaluation: Evaluation, lock: contextlib.ExitStack) -> dict[int, Path]:
    """Lock the folder of evaluations until `lock` is closed, and return the checkpoints to evaluate, by step."""
    lock.enter_context(evaluation.folder.locked())
    return evaluation.folder.start()


def _evaluate_all(request: Request, pending: Mapping[int, Path], state: PartialState) -> None:
    """Evaluate these checkpoints one after another. Collective; the main process measures and writes."""
    evaluation = request.evaluation
    with evaluation.progress(pending, state.num_processes, shown=state.is_main_process) as progress:
        for step, checkpoint in pending.items():
            result = merge_results(gather_object([_work(request, checkpoint, state).run(progress.add_responses)]))
            if state.is_main_process:
                evaluation.finish(step, result)
            progress.add_checkpoint()


def _end(evaluation: Evaluation) -> list[str]:
    evaluation.close()
    return evaluation.problems


def _work(request: Request, checkpoint: Path, state: PartialState) -> Work:
    """Return this process's share of the responses of a checkpoint."""
    gpu = state.local_process_index % max(1, torch.cuda.device_count())  # shared if there are not enough
    return Work(
        model=request.model,
        data=request.data,
        options=request.evaluation.spec.options,
        checkpoint=checkpoint,
        device=f"cuda:{gpu}" if torch.cuda.is_available() else "cpu",
        batches=request.evaluation.spec.batches(state.process_index, state.num_processes),
    )

"""`rl-training evaluate`: reads which checkpoints to evaluate and how, and evaluates each in a separate process.

Several processes (accelerate launch, torchrun) work on one checkpoint at a time, each on its share of the batches; the
main process measures and writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from omegaconf import DictConfig, OmegaConf

from rl_training.errors import UserError
from rl_training.hosts.trl.run_folder import on_main_process
from rl_training.job.configuration.groups import OF_EVALUATION
from rl_training.job.configuration.prepare import PreparedEvaluation
from rl_training.job.configuration.stored import MARK, load_settings, refuse_marked, unmarked
from rl_training.job.objects.make import make, make_task
from rl_training.job.run.evaluation_results import Evaluation
from rl_training.job.run.evaluation_worker import Work, merge_results
from rl_training.records.checkpoints import steps_taken
from rl_training.records.files.links import leads_out_of_its_run, refuse_links_out
from rl_training.records.files.masking import without_masks, without_secrets
from rl_training.records.folder import (
    CHECKPOINT,
    CONFIG_FILE,
    EVALUATIONS,
    TRAINING_STATE,
    checkpoints_of,
    has_settings,
    number_at_end,
    step_of,
)
from rl_training.records.made_by import is_of_attached_run

PATIENCE = timedelta(days=7)  # how long processes wait for the slowest one


def evaluate_run_checkpoints(prepared: PreparedEvaluation) -> int:
    """Evaluate the checkpoints that the settings name. Collective.

    Returns:
        The exit code: 0, or 1 if a checkpoint or a metric failed.

    Raises:
        UserError: If the settings name no checkpoint or task, or the folder is in use.
    """
    evaluation = read_evaluation(prepared)
    state = PartialState(cpu=True, timeout=PATIENCE)  # on the CPU: worker processes do the work, these only communicate
    with contextlib.ExitStack() as lock:
        pending = on_main_process(lambda: _begin(evaluation, lock))
        _evaluate_all(evaluation, pending, state)
        return on_main_process(evaluation.close)


def _begin(evaluation: Evaluation, lock: contextlib.ExitStack) -> dict[int, Path]:
    """Lock the folder of evaluations until `lock` is closed, and return the checkpoints to evaluate, by step."""
    lock.enter_context(evaluation.locked())
    return evaluation.start()


def _evaluate_all(evaluation: Evaluation, pending: Mapping[int, Path], state: PartialState) -> None:
    """Evaluate these checkpoints one after another. Collective; the main process measures and writes."""
    with evaluation.progress(pending, state.num_processes, shown=state.is_main_process) as progress:
        for step, checkpoint in pending.items():
            result = merge_results(gather_object([_work(evaluation, checkpoint, state).run(progress.add_responses)]))
            if state.is_main_process:
                evaluation.finish(step, result)
            progress.add_checkpoint()


def _work(evaluation: Evaluation, checkpoint: Path, state: PartialState) -> Work:
    """Return this process's share of the responses of a checkpoint."""
    gpu = state.local_process_index % max(1, torch.cuda.device_count())  # shared if there are not enough
    return Work(
        model=evaluation.config.get("model") or {},
        data=evaluation.config["data"],
        options=evaluation.options,
        checkpoint=checkpoint,
        device=f"cuda:{gpu}" if torch.cuda.is_available() else "cpu",
        batches=evaluation.batches(state.process_index, state.num_processes),
    )


# --- what to evaluate -------------------------------------------------------------------------------------------------


def read_evaluation(prepared: PreparedEvaluation) -> Evaluation:
    """Return the evaluation that these settings describe.

    Raises:
        UserError: If they name no checkpoint or task.
    """
    values = prepared.values
    run, checkpoints = find_checkpoints(values["run"], values["checkpoints"])
    run_config: Any = {}
    if run is not None and has_settings(run):
        run_config = OmegaConf.to_container(load_settings(run / CONFIG_FILE), resolve=True)
    config, is_task_of_run = _apply_overrides(run_config, values)
    refuse_marked(config, "data", "model")  # here, rather than once per checkpoint
    task_name = config["data"]["_target_"].rsplit(".", 1)[-1]
    options = _with_sampling(values["evaluation"], config.get("trainer", {}))
    name = str(options.name or task_name)
    root = Path(values["output"]) if values["output"] else run
    if root is None:
        raise UserError(f"{next(iter(checkpoints.values()))} is not in a run folder: say where to write, output=PATH")
    refuse_links_out(root, *(() if root == run else (EVALUATIONS,)))
    metrics = values["metrics"]
    settings = {"metrics": metrics, **{group: unmarked(config.get(group)) for group in OF_EVALUATION}}
    return Evaluation(
        root=root,
        name=name,
        checkpoints=checkpoints,
        task=make_task(config["data"]),
        metrics={metric: make(f"metrics.{metric}", node, _partial_=True) for metric, node in metrics.items()},
        options=options,
        settings=without_masks(without_secrets(settings)),
        run=run,
        config=config,
        prefix="evaluation/" if is_task_of_run and name == task_name else f"evaluation/{name}/",
    )


def _with_sampling(options: Mapping[str, Any], trainer: Mapping[str, Any]) -> DictConfig:
    """Return the options with temperature and response length: those given, otherwise the run's."""
    sampling = {
        name: options[name] or trainer.get(name) or default
        for name, default in (("max_completion_length", 256), ("temperature", 1.0))
    }
    return OmegaConf.create({**options, **sampling})


def _apply_overrides(config: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the run's configuration with the command's changes, and whether the task is the run's own.

    A group chosen on the command line replaces the run's. Single values override those of the run's group.
    """
    merged = dict(config)
    for group in OF_EVALUATION:
        given = options.get(group) or {}
        stored = config.get(group) or {}
        is_replaced = "_target_" in given and stored.get("_target_") != f"{MARK}{given['_target_']}"  # else: confirmed
        merged[group] = given if is_replaced else {**stored, **given}
    if not merged["data"].get("_target_"):
        raise UserError("the task of these checkpoints is not known: choose it with data=arithmetic or data=gsm8k")
    is_task_of_run = unmarked(merged["data"])["_target_"] == unmarked(config.get("data") or {}).get("_target_")
    if not is_task_of_run:  # the task's response length comes with it
        merged["trainer"] = {**config.get("trainer", {}), **options.get("trainer", {})}
    return merged, is_task_of_run


def find_checkpoints(run: str | None, given: list[str] | str | None) -> tuple[Path | None, dict[int, Path]]:
    """Return the run folder, or None, and the checkpoints to evaluate by step: those given, or all of the run."""
    paths = [Path(path) for path in ([given] if isinstance(given, str) else given or [])]
    if run is None:
        runs = {path.resolve().parents[1] for path in paths if path.resolve().parent.name == TRAINING_STATE}
        if not paths:
            raise UserError("nothing to evaluate: give run=RUN, the folder of a run, or 'checkpoints=[PATH,...]'")
        if len(runs) > 1:
            raise UserError(
                f"the checkpoints belong to several runs, {', '.join(map(str, runs))}: evaluate each run by itself"
            )
        folder = next(iter(runs), None)
    else:
        folder = Path(run)
        if not folder.is_dir():
            raise UserError(f"run={run}: there is no such folder")
        if is_of_attached_run(folder):
            raise UserError(
                f"run={run} belongs to a trainer made by a script: in Python, after `from rl_training import "
                f"evaluate`, evaluate(trainer, CHECKPOINTS, {str(run)!r}) with a new trainer of that script; on a task "
                f"of this package, 'checkpoints=[PATH,...]' data=TASK output={run}"
            )
        if not paths and not has_settings(folder):
            raise UserError(
                f"run={run} is not a run folder: it has no {CONFIG_FILE}; bare checkpoints are 'checkpoints=[PATH,...]'"
            )
        paths = paths or checkpoints_of(folder)
        if not paths:
            raise UserError(
                f"run={run} has no checkpoints ({TRAINING_STATE}/checkpoint-N): a run writes them every "
                "trainer.save_steps"
            )
    return folder, checkpoints_by_step(paths)


def checkpoints_by_step(paths: Sequence[Path]) -> dict[int, Path]:
    """Return these checkpoints by step, in the order of their steps."""
    link = next(filter(leads_out_of_its_run, paths), None)
    if link is not None:
        raise UserError(f"{link} is a link out of its run: name {link.resolve()} itself")
    by_step = {_step_of(path): path for path in paths}
    if len(by_step) < len(paths):
        raise UserError(f"two of {', '.join(map(str, paths))} are of the same step: evaluate them separately")
    return dict(sorted(by_step.items()))


def _step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint: from the name checkpoint-N, from its trainer's state, or any name."""
    folder = checkpoint.resolve()
    if CHECKPOINT.fullmatch(folder.name):
        return step_of(folder)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return steps_taken(checkpoint)
    return number_at_end(folder)

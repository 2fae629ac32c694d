"""Reads from the settings of `rl-training evaluate` what to evaluate. What is not typed comes from the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rl_training.errors import UserError
from rl_training.evaluation.options import EvaluationOptions
from rl_training.job.configuration.groups import OF_EVALUATION
from rl_training.job.configuration.prepare import PreparedEvaluation
from rl_training.job.configuration.stored import MARK, load_settings, refuse_marked, unmarked
from rl_training.job.evaluation.announcements import RunAnnouncements
from rl_training.job.evaluation.checkpoints import find_checkpoints
from rl_training.job.evaluation.evaluation import Evaluation
from rl_training.job.evaluation.result_folder import ResultFolder
from rl_training.job.evaluation.spec import EvaluationSpec
from rl_training.job.evaluation.spelling import COMMAND
from rl_training.job.objects.make import make, make_task
from rl_training.options import check_positive, check_whole
from rl_training.records.files.links import refuse_links_out
from rl_training.records.files.masking import without_masks, without_secrets
from rl_training.records.folder import CONFIG_FILE, EVALUATIONS, has_settings


@dataclass(frozen=True)
class Request:
    """An evaluation, and from which settings its worker processes make model and task."""

    evaluation: Evaluation
    model: dict[str, Any]  # the run's first model; {} if it is not known
    data: dict[str, Any]


def read_request(prepared: PreparedEvaluation) -> Request:
    """Return what these settings ask for. Nothing is written.

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
    name = ",".join(filter(None, [str(values["evaluation"]["name"] or task_name), prepared.job]))
    root = Path(values["output"]) if values["output"] else run
    if root is None:
        raise UserError(f"{next(iter(checkpoints.values()))} is not in a run folder: say where to write, output=PATH")
    refuse_links_out(root, *(() if root == run else (EVALUATIONS,)))
    metrics = values["metrics"]
    settings = {"metrics": metrics, **{group: unmarked(config.get(group)) for group in OF_EVALUATION}}
    spec = EvaluationSpec(
        checkpoints=checkpoints,
        task=make_task(config["data"]),
        metrics={metric: make(f"metrics.{metric}", node, _partial_=True) for metric, node in metrics.items()},
        options=_with_sampling(values["evaluation"], config.get("trainer", {})),
        settings=without_masks(without_secrets(settings)),
    )
    prefix = "evaluation/" if is_task_of_run and name == task_name else f"evaluation/{name}/"
    evaluation = Evaluation(spec, ResultFolder(root, name, spec, COMMAND), RunAnnouncements(run, run_config, prefix))
    return Request(evaluation, model=config.get("model") or {}, data=config["data"])


def _with_sampling(given: Mapping[str, Any], trainer: Mapping[str, Any]) -> EvaluationOptions:
    """Return the options with temperature and response length: those given, otherwise the run's, if there is one.

    Raises:
        UserError: If the run's are no numbers, or too low. Those given have been checked.
    """
    sampling = {name: given[name] or trainer.get(name) for name in ("max_completion_length", "temperature")}
    options = EvaluationOptions.of({**given, **sampling})
    check_positive("trainer.temperature", options.temperature, ": give evaluation.temperature")
    check_whole("trainer.max_completion_length", options.max_completion_length, 1)
    return options


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

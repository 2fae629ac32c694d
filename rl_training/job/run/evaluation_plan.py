"""Reads and checks what to evaluate, and evaluates one checkpoint in a worker process.

The worker imports this file, so the file imports only what the worker needs: no trainer, no report.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import rl_training.job.silence  # noqa: F401

from omegaconf import DictConfig, OmegaConf
from transformers.utils import logging

from rl_training.errors import UserError
from rl_training.evaluation.metrics import BUILT_IN, Metric
from rl_training.evaluation.policy import load_policy
from rl_training.evaluation.responses import Response, choose_rows, generate_responses, make_batches
from rl_training.evaluation.workers import Send, run_in_process
from rl_training.job.configuration.checks import check_evaluation
from rl_training.job.configuration.nested import differences
from rl_training.job.configuration.stored import MARK, load_settings, refuse_marked, unmarked
from rl_training.job.objects.make import make
from rl_training.job.run.evaluated_checkpoints import find_checkpoints
from rl_training.limited_files import MAX_STATE_BYTES, read_bytes
from rl_training.records.evaluated import SETTINGS, read_step, write_settings
from rl_training.records.files.links import refuse_links_out
from rl_training.records.files.masking import without_masks, without_secrets
from rl_training.records.folder import CONFIG_FILE, EVALUATIONS
from rl_training.tasks.task import Task, as_task

GROUPS = ("model", "adapter", "data")
# Settings that affect how a result is computed or stored, but not the result.
NOT_COMPARED = ("name", "batch_size", "jobs", "gzip", "overwrite")


@dataclass(frozen=True)
class EvaluationPlan:
    """An evaluation that is ready to start. It is sent to the worker processes."""

    NAME_HINT: ClassVar[str] = "evaluation.name=NAME"  # what to type for another folder
    OVERWRITE_HINT: ClassVar[str] = "evaluation.overwrite=true"  # what to type for a new evaluation in the same folder

    run: Path | None
    config: dict[str, Any]  # the run's, with the command's changes
    folder: Path  # evaluations/<name>
    prefix: str  # of metric names in dashboards
    checkpoints: dict[int, Path]  # by step, in order
    rows: tuple[int, ...]  # indices into the task's evaluation split
    options: DictConfig  # `evaluation` of conf/evaluate.yaml; temperature and length default to the run's
    metrics: dict[str, Any]  # configuration nodes of the user's own metrics, by name
    settings: dict[str, Any]  # must be equal for results to share a table; contains no secrets

    def task(self) -> Task:
        return as_task(make("data", self.config["data"]))

    def batches(self, share: int, num_shares: int) -> list[list[tuple[int, int]]]:
        """Return the batches of process number `share` out of `num_shares`."""
        options = self.options
        batches = make_batches(self.rows, options.responses_per_prompt, options.greedy, options.batch_size)
        return batches[share::num_shares]

    def custom_metrics(self) -> dict[str, Metric]:
        return {name: make(f"metrics.{name}", node, _partial_=True) for name, node in self.metrics.items()}

    def pending(self) -> dict[int, Path]:
        """Return the checkpoints to evaluate, by step: new, failed, overwritten, or with a metric that failed."""
        pending = {}
        for step, checkpoint in self.checkpoints.items():
            result = None if self.options.overwrite else read_step(self.folder, step)
            if result is None or result.get("errors") or result.get("fingerprint") != fingerprint(checkpoint):
                pending[step] = checkpoint
        return pending

    def start(self) -> None:
        """Create the evaluation's folder.

        Raises:
            UserError: If a folder of this name contains results with other settings.
        """
        if self.options.overwrite:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif not any(self.folder.glob("step_*")):
            (self.folder / SETTINGS).unlink(missing_ok=True)  # without results, the old settings do not matter
        before = write_settings(self.folder, self.settings)
        if changed := differences(before, self.settings):
            raise UserError(
                f"{self.folder} was made with other settings: {changed}. Write this one beside it with "
                f"{self.NAME_HINT}, or replace it with {self.OVERWRITE_HINT}"
            )


def read_plan(cfg: DictConfig) -> EvaluationPlan:
    """Return the evaluation that a configuration describes.

    Raises:
        UserError: For every mistake in the configuration.
    """
    check_evaluation(cfg)
    values: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    run, checkpoints = find_checkpoints(values["run"], values["checkpoints"])
    run_config: Any = {}
    if run is not None and (run / CONFIG_FILE).is_file():
        run_config = OmegaConf.to_container(load_settings(run / CONFIG_FILE), resolve=True)
    config, is_task_of_run = _apply_overrides(run_config, values)
    refuse_marked(config, "data", "model")  # here, rather than once per checkpoint
    task_name = config["data"]["_target_"].rsplit(".", 1)[-1]
    options, metrics = OmegaConf.create(values["evaluation"]), values["metrics"]
    for key, default in (("max_completion_length", 256), ("temperature", 1.0)):
        options[key] = options[key] or config.get("trainer", {}).get(key) or default
    name = str(options.name or task_name)
    check_name(name)
    root = Path(values["output"]) if values["output"] else run
    if root is None:
        raise UserError(f"{next(iter(checkpoints.values()))} is not in a run folder: say where to write, output=PATH")
    refuse_links_out(root, *(() if root == run else (EVALUATIONS,)))
    refuse_names_of_built_in(metrics)
    num_rows = len(as_task(make("data", config["data"])).eval_dataset)
    if num_rows == 0:
        raise UserError(f"the evaluation split of {task_name} has no rows: give data of your own, data.path=FILE")
    settings = {str(key): value for key, value in options.items() if key not in NOT_COMPARED}
    settings |= {"metrics": metrics, **{group: unmarked(config.get(group)) for group in GROUPS}}
    plan = EvaluationPlan(
        run=run,
        config=config,
        folder=root / EVALUATIONS / name,
        prefix="evaluation/" if is_task_of_run and name == task_name else f"evaluation/{name}/",
        checkpoints=checkpoints,
        rows=choose_rows(num_rows, options.fraction, options.seed),
        options=options,
        metrics=metrics,
        settings=without_masks(without_secrets(settings)),
    )
    plan.custom_metrics()  # refuses a metric that cannot be found before anything is written
    return plan


def check_name(name: str) -> None:
    """Raise UserError for a name that would point outside the evaluations folder."""
    if "/" in name or name.startswith("."):
        raise UserError(f"evaluation.name={name} names a folder: use letters, digits and dashes")


def refuse_names_of_built_in(metrics: Collection[str]) -> None:
    """Raise UserError for a user metric with the name of a built-in one."""
    for metric in metrics:
        if metric in BUILT_IN:
            raise UserError(f"metrics.{metric}: there is a built-in metric {metric}; give yours another name")


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


def _apply_overrides(config: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the run's configuration with the command's changes, and whether the task is the run's own.

    A group chosen on the command line replaces the run's. Single values override those of the run's group.
    """
    merged = dict(config)
    for group in GROUPS:
        given, stored = options.get(group) or {}, config.get(group) or {}
        is_replaced = "_target_" in given and stored.get("_target_") != f"{MARK}{given['_target_']}"  # else: confirmed
        merged[group] = given if is_replaced else {**stored, **given}
    if not merged["data"].get("_target_"):
        raise UserError("the task of these checkpoints is not known: choose it with data=arithmetic or data=gsm8k")
    is_task_of_run = unmarked(merged["data"])["_target_"] == unmarked(config.get("data") or {}).get("_target_")
    if not is_task_of_run:  # the task's response length comes with it
        merged["trainer"] = {**config.get("trainer", {}), **options.get("trainer", {})}
    return merged, is_task_of_run


@dataclass
class CheckpointResponses:
    """The result of one checkpoint: its responses and the seconds they took, or the reason why there are none."""

    responses: list[Response] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    reason: str = ""


def run_worker(
    plan: EvaluationPlan,
    checkpoint: Path,
    device: str,
    share: int,
    num_shares: int,
    on_responses: Callable[[int], object],
) -> CheckpointResponses:
    """Generate the responses of one checkpoint in a worker process, and return them.

    Args:
        plan: The evaluation.
        checkpoint: Checkpoint folder.
        device: Device for the worker.
        share: This process's number among those that share the batches.
        num_shares: How many processes share the batches.
        on_responses: Called with the number of responses after each batch.
    """
    result = CheckpointResponses()

    def receive(sent: tuple[list[Response], dict[str, float]]) -> None:
        responses, result.seconds = sent
        result.responses += responses
        on_responses(len(responses))

    start = time.perf_counter()
    work = functools.partial(_send_responses, plan, checkpoint, device, share, num_shares)
    result.reason = run_in_process(work, receive, imports=[__name__])
    result.seconds["total"] = time.perf_counter() - start
    return result


def _send_responses(
    plan: EvaluationPlan, checkpoint: Path, device: str, share: int, num_shares: int, send: Send
) -> None:
    """Send the checkpoint's responses batch by batch, each with the seconds used so far, by phase."""
    logging.disable_progress_bar()
    start = time.perf_counter()
    model = plan.config.get("model") or {}
    policy = load_policy(
        checkpoint,
        functools.partial(make, "model", model) if model else None,
        with_reference=plan.options.kl and bool(model),
        temperature=plan.options.temperature,
        max_completion_length=plan.options.max_completion_length,
        device=device,
        dtype=model.get("dtype", "float32"),
        quantization=model.get("quantization"),
    )
    task = plan.task()
    seconds = {"load": time.perf_counter() - start}
    for responses in generate_responses(policy, task, plan.batches(share, num_shares), plan.options.seed, seconds):
        send((responses, seconds))


def merge_results(parts: list[CheckpointResponses]) -> CheckpointResponses:
    """Merge the results of all processes. Times are those of the slowest process."""
    if len(parts) == 1:
        return parts[0]
    reasons = [f"process {rank}: {part.reason}" for rank, part in enumerate(parts) if part.reason]
    names = {name for part in parts for name in part.seconds}
    seconds = {name: max(part.seconds.get(name, 0.0) for part in parts) for name in sorted(names)}
    return CheckpointResponses([r for part in parts for r in part.responses], seconds, "; ".join(reasons))

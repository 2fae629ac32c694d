"""What is to be evaluated: the configuration of the run with what the command changes, read and checked."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from rl_training.evaluation.metrics import BUILT_IN, Metric
from rl_training.evaluation.responses import Sampling, choose_rows
from rl_training.job.run_settings import load_settings
from rl_training.job.settings import check_evaluation
from rl_training.records.checkpoints import checkpoints_of
from rl_training.records.evaluated import EVALUATIONS, SETTINGS, read_step, write_settings
from rl_training.records.folder import CONFIG_FILE, TRAINING_STATE
from rl_training.tasks.task import Task

GROUPS = ("model", "adapter", "data")
# Settings that change how a result is computed, but not the result.
FREE = ("name", "batch_size", "jobs", "gzip", "overwrite")


@dataclass(frozen=True)
class EvaluationPlan:
    """An evaluation, ready to start; it is sent to the worker processes."""

    run: Path | None
    config: dict[str, Any]  # of the run, with what the command changes
    folder: Path  # evaluations/<name>
    prefix: str  # of the metrics' names in dashboards
    checkpoints: dict[int, Path]  # by step, in order
    sampling: Sampling
    temperature: float
    max_completion_length: int
    max_k: int
    right_reward: float
    kl: bool
    metrics: dict[str, Any]  # nodes of the user's own
    jobs: int
    gzip: bool
    overwrite: bool
    settings: dict[str, Any]  # what must be equal for two results to share a table

    def task(self) -> Task:
        return make("data", self.config["data"])

    def custom_metrics(self) -> dict[str, Metric]:
        return {name: make(f"metrics.{name}", node, _partial_=True) for name, node in self.metrics.items()}

    def pending(self) -> dict[int, Path]:
        """Returns the checkpoints that are not finished: new, failed, written anew, or with a metric that raised."""
        if self.overwrite:
            return self.checkpoints
        return {step: path for step, path in self.checkpoints.items() if not self._is_finished(step, path)}

    def _is_finished(self, step: int, checkpoint: Path) -> bool:
        found = read_step(self.folder, step)
        return found is not None and not found["errors"] and found["fingerprint"] == fingerprint(checkpoint)

    def start(self) -> None:
        """Makes the evaluation's folder. ValueError when one of this name holds results of other settings."""
        if self.overwrite:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif not any(self.folder.glob("step_*")):
            (self.folder / SETTINGS).unlink(missing_ok=True)  # an evaluation without results imposes no settings
        before = write_settings(self.folder, self.settings)
        changed = [
            f"{key}={self.settings.get(key)!r} (was {before.get(key)!r})"
            for key in sorted({*before, *self.settings})
            if before.get(key) != self.settings.get(key)
        ]
        if changed:
            raise ValueError(
                f"{self.folder} was made with other settings: {', '.join(changed)}. Write this one beside it with "
                "evaluation.name=NAME, or replace it with evaluation.overwrite=true"
            )


def read_plan(cfg: DictConfig) -> EvaluationPlan:
    """Returns the evaluation that the configuration asks for. ValueError for whatever the user got wrong."""
    check_evaluation(cfg)
    asked: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    run, checkpoints = _find_checkpoints(asked["run"], asked["checkpoints"])
    config, own_task = _lay_over(_config_of(run), asked)
    e = asked["evaluation"]
    trainer = config.get("trainer", {})
    max_length = e["max_completion_length"] or trainer.get("max_completion_length") or 256
    temperature = e["temperature"] or trainer.get("temperature") or 1.0
    task_name = config["data"]["_target_"].rsplit(".", 1)[-1]
    name = str(e["name"] or task_name)
    if "/" in name or name.startswith("."):
        raise ValueError(f"evaluation.name={name} names a folder: use letters, digits and dashes")
    root = Path(asked["output"]) if asked["output"] else run
    if root is None:
        raise ValueError(f"{next(iter(checkpoints.values()))} is not in a run folder: say where to write, output=PATH")
    for metric in asked["metrics"]:
        if metric in BUILT_IN:
            raise ValueError(f"metrics.{metric}: there is a built-in metric {metric}; give yours another name")
    num_rows = len(make("data", config["data"]).eval_dataset)
    if num_rows == 0:
        raise ValueError(f"the evaluation split of {task_name} has no rows: give data of your own, data.path=FILE")
    rows = choose_rows(num_rows, e["fraction"], e["seed"])
    settings = {key: value for key, value in e.items() if key not in FREE}
    settings |= {"temperature": temperature, "max_completion_length": max_length, "metrics": asked["metrics"]}
    settings |= {group: config.get(group) for group in GROUPS}
    plan = EvaluationPlan(
        run=run,
        config=config,
        folder=root / EVALUATIONS / name,
        prefix="evaluation/" if own_task and name == task_name else f"evaluation/{name}/",
        checkpoints=checkpoints,
        sampling=Sampling(rows, e["responses_per_prompt"], e["greedy"], e["batch_size"], e["seed"]),
        temperature=temperature,
        max_completion_length=max_length,
        max_k=e["k"] or e["responses_per_prompt"],
        right_reward=e["right_reward"],
        kl=e["kl"] and bool(config.get("model")),
        metrics=asked["metrics"],
        jobs=e["jobs"],
        gzip=e["gzip"],
        overwrite=e["overwrite"],
        settings=settings,
    )
    plan.custom_metrics()  # one that cannot be found is refused before anything is written
    return plan


def make(key: str, node: Mapping[str, Any], **values: Any) -> Any:
    """Returns what a node of the configuration describes. ValueError, naming the key, when it describes nothing."""
    try:
        return instantiate(dict(node), _convert_="all", **values)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError | OSError):
            raise cause from None  # of a maker's own, in its words
        raise ValueError(f"{key}: {' '.join(str(cause or error).split())}") from error


def fingerprint(checkpoint: Path) -> str:
    """Returns a fingerprint that distinguishes a checkpoint from a later one in the same folder.

    It is made of the trainer's log, which holds each step's timings, and the sizes of the weights.
    """
    digest = hashlib.sha256()
    state = checkpoint / "trainer_state.json"
    if state.is_file():
        digest.update(state.read_bytes())
    digest.update(repr(sorted((p.name, p.stat().st_size) for p in checkpoint.glob("*.safetensors"))).encode())
    return digest.hexdigest()


def _find_checkpoints(run: str | None, checkpoints: list[str] | str | None) -> tuple[Path | None, dict[int, Path]]:
    """Returns the run, if there is one, and its checkpoints, or those that are listed, by step."""
    if run is None and not checkpoints:
        raise ValueError("nothing to evaluate: give run=RUN, the folder of a run, or 'checkpoints=[PATH,...]'")
    folder = None if run is None else Path(run)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"run={run}: there is no such folder")
    if checkpoints:
        paths = [Path(path) for path in ([checkpoints] if isinstance(checkpoints, str) else checkpoints)]
        if folder is None:
            folder = _run_of(paths)
    else:
        assert folder is not None
        if not (folder / CONFIG_FILE).is_file():
            raise ValueError(f"run={run} is not a run folder: it has no {CONFIG_FILE}. For bare checkpoints: "
                             "'checkpoints=[PATH,...]'")  # fmt: skip
        paths = checkpoints_of(folder)
        if not paths:
            raise ValueError(f"run={run} has no checkpoints ({TRAINING_STATE}/checkpoint-N): a run writes them every "
                             "trainer.save_steps")  # fmt: skip
    by_step: dict[int, Path] = {}
    for path in paths:
        step = step_of(path)
        if step in by_step:
            raise ValueError(f"{by_step[step]} and {path} are both of step {step}: evaluate them separately")
        by_step[step] = path
    return folder, dict(sorted(by_step.items()))


def step_of(checkpoint: Path) -> int:
    """Returns the optimizer step that a checkpoint's folder is named after or its trainer wrote down; else 0."""
    last = checkpoint.resolve().name.rsplit("-", 1)[-1]
    if last.isdigit():
        return int(last)
    try:
        return int(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError):
        return 0


def _run_of(checkpoints: list[Path]) -> Path | None:
    """Returns the run whose checkpoints these are; None when they are of no run. ValueError when of several."""
    runs = {path.resolve().parent.parent for path in checkpoints if path.resolve().parent.name == TRAINING_STATE}
    if len(runs) > 1:
        raise ValueError(
            f"the checkpoints are of several runs, {', '.join(map(str, sorted(runs)))}: evaluate each separately"
        )
    return next(iter(runs), None)


def _config_of(run: Path | None) -> dict[str, Any]:
    if run is None or not (run / CONFIG_FILE).is_file():
        return {}
    return OmegaConf.to_container(load_settings(run / CONFIG_FILE), resolve=True)  # type: ignore[return-value]


def _lay_over(config: dict[str, Any], asked: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Returns the run's configuration with what was asked for, and whether the task is the run's own.

    A group that was chosen takes the place of the run's; single values of it are set in the run's.
    """
    laid = dict(config)
    for group in GROUPS:
        given = asked.get(group) or {}
        laid[group] = given if "_target_" in given else {**(config.get(group) or {}), **given}
    if not laid["data"].get("_target_"):
        raise ValueError("the task of these checkpoints is not known: choose it with data=arithmetic or data=gsm8k")
    own_task = laid["data"]["_target_"] == (config.get("data") or {}).get("_target_")
    if not own_task:  # its lengths go with it
        laid["trainer"] = {**config.get("trainer", {}), **asked.get("trainer", {})}
    return laid, own_task

"""The evaluation of checkpoints of the user's own trainer: the same numbers and files as `rl-training evaluate` has.

from rl_training import evaluate

trainer = GRPOTrainer(...)              # as the script makes it; it has not trained
table = evaluate(trainer, ["state/checkpoint-20", "state/checkpoint-40"], "runs/my_run")
table[table["metric"] == "reward"]
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
from omegaconf import OmegaConf
from transformers import PreTrainedModel

from rl_training.errors import UserError
from rl_training.evaluation.metrics import Metric
from rl_training.evaluation.policy import CheckpointPolicy
from rl_training.evaluation.responses import choose_rows, generate_responses
from rl_training.evaluation.workers import reason_of
from rl_training.hosts.trl.batches import rewards_of
from rl_training.hosts.trl.compatibility import another_trainer
from rl_training.hosts.trl.trainer import GRPOTrainer
from rl_training.job.configuration.checks import check_evaluation
from rl_training.job.configuration.nested import load_plain
from rl_training.job.configuration.shipped import CONF
from rl_training.job.configuration.values import did_you_mean
from rl_training.job.run.evaluated_checkpoints import checkpoints_by_step
from rl_training.job.run.evaluation import ELSEWHERE, Evaluation
from rl_training.job.run.evaluation_plan import (
    FREE,
    CheckpointResponses,
    EvaluationPlan,
    check_name,
    refuse_names_of_built_in,
)
from rl_training.offline.checkpoint_files import refuse_other_weights
from rl_training.records.checkpoints import what_is_wrong_with_weights
from rl_training.records.evaluated import read_table
from rl_training.records.files.links import refuse_links_out
from rl_training.records.files.lock import locked
from rl_training.records.folder import EVALUATIONS
from rl_training.tasks.task import Task


@dataclass(frozen=True)
class OwnPlan(EvaluationPlan):
    """An evaluation whose task and metrics are objects of the user's script."""

    NAMED: ClassVar[str] = "name=NAME"
    REPLACED: ClassVar[str] = "overwrite=True"

    own_task: Task
    own_metrics: Mapping[str, Metric]

    def task(self) -> Task:
        return self.own_task

    def custom_metrics(self) -> dict[str, Metric]:
        return dict(self.own_metrics)


def evaluate(
    trainer: GRPOTrainer,
    checkpoints: Sequence[str | Path] | str | Path,
    folder: str | Path,
    *,
    eval_dataset: Any = None,
    given_answer: Callable[[str], str | None] | None = None,
    reward_range: tuple[float, float] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    name: str = "default",
    **options: Any,
) -> pd.DataFrame:
    """Evaluate checkpoints on held-out prompts, with the trainer's own reward. Nothing is trained.

    A response earns what it earns in training: the weighted sum of the trainer's reward functions. It is sampled at the
    trainer's temperature, up to its max_completion_length; top_p, top_k, min_p and penalties are not followed. A
    checkpoint that was evaluated before is not evaluated again.

    Args:
        trainer: As the training had it: the same model, adapter and reward. It has not trained, and keeps its weights.
        checkpoints: Folders checkpoint-N that the trainer has written.
        folder: That of the run, as `attach` was given it: results go to FOLDER/evaluations/NAME, and into its report.
        eval_dataset: A datasets.Dataset of prompts, with the columns that the reward reads; None: the trainer's own.
        given_answer: What counts as one vote in `majority`: the answer in a text, None where it has none.
        reward_range: The least and the most that a response can earn, where that is known.
        metrics: Metrics of your own by name, each called as `rl-training evaluate` calls one.
        options: responses_per_prompt, k, fraction, greedy, right_reward, kl, seed, batch_size, gzip and overwrite, with
            the meanings and defaults of `evaluation` in conf/evaluate.yaml.

    Returns:
        A row per checkpoint and metric, with its standard error, or the reason that there is none.

    Raises:
        UserError: saying what is wrong and the fix. Where single checkpoints or metrics failed it comes last: the
            others have been evaluated.
    """
    if not isinstance(trainer, GRPOTrainer):
        raise UserError(another_trainer(trainer))
    _refuse_other_generation(trainer)
    dataset = trainer.eval_dataset if eval_dataset is None else eval_dataset
    if dataset is None:
        raise UserError("the trainer has no eval_dataset: give evaluate(..., eval_dataset=DATASET)")
    task = Task(dataset, dataset, _reward_of(trainer), given_answer, reward_range)
    plan = _plan(trainer, checkpoints, Path(folder), name, task, metrics or {}, _with_defaults(options))
    with locked(Path(folder), ELSEWHERE):
        plan.start()
        evaluation = Evaluation(plan, num_shares=1)
        with _weights_kept(trainer.model), contextlib.closing(evaluation.bar):
            reference = _first_model(trainer.model) if plan.options.kl and evaluation.pending else None
            for step, checkpoint in evaluation.pending.items():
                evaluation.finish(step, _responses(trainer, checkpoint, reference, plan, evaluation.bar.update))
        evaluation.close()
    if evaluation.problems:
        raise UserError("; ".join(evaluation.problems))
    return read_table(plan.folder)


def _refuse_other_generation(trainer: GRPOTrainer) -> None:
    """Raise UserError for a trainer whose prompts or weights are not those of one model in one process, as text."""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.accelerator.num_processes > 1:
        raise UserError("evaluate works in one process: start the script with python, without a launcher")
    if trainer.state.global_step > 0:
        raise UserError("the trainer has trained, and its first weights are gone: give evaluate a new trainer")
    if trainer._is_vlm or trainer.tools or trainer.environments is not None or trainer.rollout_func is not None:
        raise UserError(
            "evaluate takes one response of text to each prompt: images, tools, environments and rollout_func are not "
            "followed; give a trainer without them"
        )


def _with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options, those that are not given as the command has them."""
    defaults = load_plain(CONF / "evaluate.yaml")["evaluation"]
    for key in ("name", "temperature", "max_completion_length", "jobs"):
        del defaults[key]  # an argument by itself, two of the trainer's, and one of the command alone
    for key in options:
        if key not in defaults:
            raise UserError(f"evaluate({key}=...): there are {', '.join(defaults)}{did_you_mean(key, [*defaults])}")
    values = {**defaults, **options}
    check_evaluation(OmegaConf.create({"evaluation": values}))
    return values


def _reward_of(trainer: GRPOTrainer) -> Callable[..., list[float]]:
    """Return the weighted sum of the trainer's reward functions, called as training calls them."""

    def reward(prompts: list[Any], completions: list[Any], completion_ids: list[Any], **columns: Any) -> list[float]:
        columns = {"prompt": prompts, **columns}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return rewards_of(trainer, rows, completion_ids).tolist()

    return reward


def _plan(
    trainer: GRPOTrainer,
    checkpoints: Sequence[str | Path] | str | Path,
    folder: Path,
    name: str,
    task: Task,
    metrics: Mapping[str, Metric],
    values: Mapping[str, Any],
) -> OwnPlan:
    paths = [Path(path) for path in ([checkpoints] if isinstance(checkpoints, str | Path) else checkpoints)]
    if not paths:
        raise UserError("nothing to evaluate: give evaluate folders checkpoint-N of the trainer's output_dir")
    if len(task.eval_dataset) == 0:
        raise UserError("eval_dataset has no rows: give one with prompts")
    refuse_names_of_built_in(metrics)
    check_name(name)
    refuse_links_out(folder, EVALUATIONS)
    options = OmegaConf.create(
        {
            **values,
            "temperature": trainer.args.temperature,
            "max_completion_length": trainer.args.max_completion_length,
            "jobs": 1,
        }
    )
    weights = map(float, trainer.reward_weights)
    settings = {str(key): value for key, value in options.items() if key not in FREE} | {
        "metrics": [*metrics],
        "rewards": dict(zip(trainer.reward_func_names, weights, strict=True)),
        "prompts": hashlib.sha256(repr(task.eval_dataset["prompt"][:]).encode()).hexdigest(),
    }
    return OwnPlan(
        run=folder,
        config={},
        folder=folder / EVALUATIONS / name,
        prefix="",
        checkpoints=checkpoints_by_step(paths),
        rows=choose_rows(len(task.eval_dataset), options.fraction, options.seed),
        options=options,
        metrics={},
        settings=settings,
        own_task=task,
        own_metrics=metrics,
    )


def _first_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model that training begins from: a copy, or this one, whose adapter is then switched off."""
    return model if hasattr(model, "peft_config") else copy.deepcopy(model).eval()


@contextlib.contextmanager
def _weights_kept(model: PreTrainedModel) -> Iterator[None]:
    """A context after which the model has the weights and the mode that it had before."""
    kept = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters() if p.requires_grad}
    was_training = model.training
    try:
        yield
    finally:
        model.train(was_training)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in kept:
                    parameter.copy_(kept[name])


def policy_of(trainer: GRPOTrainer, reference: PreTrainedModel | None) -> CheckpointPolicy:
    """Return the policy of the weights that the trainer has now, which is told of prompts what training tells it."""
    return CheckpointPolicy(
        trainer.model.eval(),
        trainer._tokenizer,
        reference,
        trainer.args.temperature,
        trainer.args.max_completion_length,
        template={"chat_template": trainer.chat_template, **trainer.chat_template_kwargs},
    )


def _responses(
    trainer: GRPOTrainer,
    checkpoint: Path,
    reference: PreTrainedModel | None,
    plan: OwnPlan,
    on_responses: Callable[[int], object],
) -> CheckpointResponses:
    """Return the responses of one checkpoint, or the reason that there are none."""
    answers, start = CheckpointResponses(), time.perf_counter()
    try:
        flaw = what_is_wrong_with_weights(checkpoint) if checkpoint.is_dir() else "there is no such folder"
        if flaw:
            raise UserError(flaw)
        refuse_other_weights(trainer.model, checkpoint)
        trainer._load_from_checkpoint(str(checkpoint))
        policy = policy_of(trainer, reference)
        answers.seconds["load"] = time.perf_counter() - start
        batches = plan.batches(0, 1)
        for responses in generate_responses(policy, plan.own_task, batches, plan.options.seed, answers.seconds):
            answers.responses += responses
            on_responses(len(responses))
    except UserError as error:
        answers.reason = reason_of(error)
    answers.seconds["total"] = time.perf_counter() - start
    return answers

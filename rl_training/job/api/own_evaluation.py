"""Evaluates checkpoints of the user's own trainer, with the same numbers and files as `rl-training evaluate`.

    from rl_training import evaluate

    trainer = GRPOTrainer(...)  # as the script makes it, before training
    table = evaluate(trainer, ["state/checkpoint-20", "state/checkpoint-40"], "runs/my_run")
    table[table["metric"] == "reward"]

The trainer must not have trained: its weights are the reference of the KL divergence.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel

from rl_training.errors import UserError, is_short_of_memory, one_line
from rl_training.evaluation.metrics import Metric
from rl_training.evaluation.options import EvaluationOptions
from rl_training.evaluation.policy import CheckpointPolicy
from rl_training.evaluation.responses import generate_responses
from rl_training.hosts.trl.rollouts.batches import rewards_of
from rl_training.hosts.trl.trainer import GRPOTrainer
from rl_training.hosts.trl.trainer_kind import refuse_other_trainers
from rl_training.hosts.trl.versions import generation_calls_code, has_images, tokenizer_of
from rl_training.job.configuration.checks import check_evaluation_options
from rl_training.job.configuration.nested import load_plain
from rl_training.job.configuration.shipped import CONF
from rl_training.job.evaluation.announcements import RunAnnouncements
from rl_training.job.evaluation.checkpoints import checkpoints_by_step
from rl_training.job.evaluation.evaluation import Evaluation
from rl_training.job.evaluation.result_folder import ResultFolder
from rl_training.job.evaluation.spec import EvaluationSpec
from rl_training.job.evaluation.spelling import PYTHON
from rl_training.job.evaluation.worker import CheckpointResponses
from rl_training.offline.checkpoint_files import refuse_other_weights
from rl_training.options import did_you_mean
from rl_training.policy.finite import refuse_diverged
from rl_training.records.checkpoint_flaws import find_weights_flaw
from rl_training.records.evaluated import read_table
from rl_training.records.files.links import refuse_links_out
from rl_training.records.folder import EVALUATIONS
from rl_training.tasks.task import Task


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
    """Evaluate checkpoints on held-out prompts with the trainer's own reward. Nothing is trained.

    Responses are rewarded as in training, by the weighted sum of the trainer's reward functions. They are sampled at
    the trainer's temperature, up to its max_completion_length; top_p, top_k, min_p and penalties are ignored.
    Checkpoints that have already been evaluated are skipped.

    Args:
        trainer: A new trainer, made as for the training, with the same model, adapter and reward. It must not have
            trained. Its weights are restored afterwards.
        checkpoints: Folders checkpoint-N that the trainer has written.
        folder: Run folder, as given to `attach`. Results go to FOLDER/evaluations/NAME and into the run's report.
        eval_dataset: A datasets.Dataset of prompts, with the columns that the reward reads. None uses the trainer's.
        given_answer: Returns the answer in a response text, or None if there is none. Equal answers are votes for the
            same answer in `majority`.
        reward_range: The lowest and highest reward that a response can get, if known.
        metrics: Your own metrics by name, called as `rl-training evaluate` calls them.
        name: Name of the evaluation, and of its folder.
        options: responses_per_prompt, k, fraction, greedy, right_reward, kl, seed, batch_size, gzip and overwrite, with
            the meanings and defaults of `evaluation` in conf/evaluate.yaml.

    Returns:
        One row per checkpoint and metric, with the standard error, or the reason why there is no value.

    Raises:
        UserError: Says what is wrong and how to fix it. If single checkpoints or metrics failed, it is raised at the
            end, after all others have been evaluated.
    """
    refuse_other_trainers(trainer)
    _refuse_unsupported_trainer(trainer)
    dataset = trainer.eval_dataset if eval_dataset is None else eval_dataset
    if dataset is None:
        raise UserError("the trainer has no eval_dataset: give evaluate(..., eval_dataset=DATASET)")
    paths = [Path(path) for path in ([checkpoints] if isinstance(checkpoints, str | Path) else checkpoints)]
    if not paths:
        raise UserError("nothing to evaluate: give evaluate folders checkpoint-N of the trainer's output_dir")
    refuse_links_out(Path(folder), EVALUATIONS)
    weights = map(float, trainer.reward_weights)
    spec = EvaluationSpec(
        checkpoints=checkpoints_by_step(paths),
        task=Task(dataset, dataset, _reward_of(trainer), given_answer, reward_range),
        metrics=metrics or {},
        options=_options(trainer, options),
        settings={
            "metrics": [*(metrics or {})],
            "rewards": dict(zip(trainer.reward_func_names, weights, strict=True)),
            "prompts": hashlib.sha256(repr(dataset["prompt"][:]).encode()).hexdigest(),
        },
    )
    results = ResultFolder(Path(folder), name, spec, PYTHON)
    evaluation = Evaluation(spec, results, RunAnnouncements(Path(folder), config={}, prefix=""))
    with results.locked():
        pending = results.start()
        with _restoring_weights(trainer.model), evaluation.progress(pending) as progress:
            reference = _initial_model(trainer.model) if spec.options.kl and pending else None
            for step, checkpoint in pending.items():
                result = _responses(trainer, checkpoint, reference, spec, progress.add_responses)
                evaluation.finish(step, result)
                progress.add_checkpoint()
        evaluation.close()
    if evaluation.problems:
        raise UserError("; ".join(evaluation.problems))
    return read_table(results.path)


def _refuse_unsupported_trainer(trainer: GRPOTrainer) -> None:
    """Raise UserError for a trainer that is distributed, has trained, or does more than answer prompts with text."""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.accelerator.num_processes > 1:
        raise UserError("evaluate works in one process: start the script with python, without a launcher")
    if trainer.state.global_step > 0:
        raise UserError("the trainer has trained, and its first weights are gone: give evaluate a new trainer")
    if has_images(trainer) or generation_calls_code(trainer):
        raise UserError(
            "evaluate generates plain text responses: images, tools, environments and rollout_func are not supported; "
            "give a trainer without them"
        )


def _options(trainer: GRPOTrainer, given: Mapping[str, Any]) -> EvaluationOptions:
    """Return all options: those given, the trainer's sampling, and the command's defaults."""
    sampling = {name: getattr(trainer.args, name) for name in ("temperature", "max_completion_length")}
    defaults = load_plain(CONF / "evaluate.yaml")["evaluation"]
    choices = [name for name in defaults if name not in ("name", *sampling)]  # `name` is an argument of its own
    for key in given:
        if key not in choices:
            raise UserError(f"evaluate({key}=...): there are {', '.join(choices)}{did_you_mean(key, choices)}")
    values = {**defaults, **given}
    check_evaluation_options(values, PYTHON.prefix)
    return EvaluationOptions.of(values | sampling)


def _reward_of(trainer: GRPOTrainer) -> Callable[..., list[float]]:
    """Return a function that computes the weighted sum of the trainer's reward functions, called as in training."""

    def reward(prompts: list[Any], completions: list[Any], completion_ids: list[Any], **columns: Any) -> list[float]:
        columns = {"prompt": prompts, **columns}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return rewards_of(trainer, rows, completion_ids).tolist()

    return reward


def _initial_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model before training: a copy, or the model itself if its adapter can be switched off."""
    return model if hasattr(model, "peft_config") else copy.deepcopy(model).eval()


@contextlib.contextmanager
def _restoring_weights(model: PreTrainedModel) -> Iterator[None]:
    """Restore the model's trainable weights and its training mode on exit."""
    saved = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters() if p.requires_grad}
    was_training = model.training
    try:
        yield
    finally:
        model.train(was_training)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in saved:
                    parameter.copy_(saved[name])


def policy_of(trainer: GRPOTrainer, reference: PreTrainedModel | None) -> CheckpointPolicy:
    """Return a policy with the trainer's present weights, which formats prompts as training does."""
    return CheckpointPolicy(
        trainer.model.eval(),
        tokenizer_of(trainer),
        reference,
        trainer.args.temperature,
        trainer.args.max_completion_length,
        template={"chat_template": trainer.chat_template, **trainer.chat_template_kwargs},
    )


def _responses(
    trainer: GRPOTrainer,
    checkpoint: Path,
    reference: PreTrainedModel | None,
    spec: EvaluationSpec,
    on_responses: Callable[[int], None],
) -> CheckpointResponses:
    """Return the responses of one checkpoint, or the reason why there are none.

    Args:
        on_responses: Called with the number of responses after each batch.
    """
    result = CheckpointResponses()
    start = time.perf_counter()
    try:
        flaw = find_weights_flaw(checkpoint) if checkpoint.is_dir() else "there is no such folder"
        if flaw:
            raise UserError(flaw)
        refuse_other_weights(trainer.model, checkpoint)
        trainer._load_from_checkpoint(str(checkpoint))
        refuse_diverged(trainer.model.named_parameters())
        policy = policy_of(trainer, reference)
        result.seconds["load"] = time.perf_counter() - start
        batches = spec.batches()
        for responses, seconds in generate_responses(policy, spec.task, batches, spec.options.seed):
            result.add(responses, seconds)
            on_responses(len(responses))
    except Exception as error:
        if not isinstance(error, UserError) and not is_short_of_memory(error):
            raise
        result.reason = one_line(error, "lower batch_size")
    result.seconds["total"] = time.perf_counter() - start
    return result

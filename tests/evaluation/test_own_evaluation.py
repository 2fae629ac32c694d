"""Checkpoints of a user's own trainer are evaluated in Python with the objects of the user's script."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import prepared_evaluation
from peft import LoraConfig
from trainers import LORA, graded, trained_weights
from trl import GRPOConfig, GRPOTrainer

from rl_training import attach, evaluate
from rl_training.errors import UserError
from rl_training.evaluation.responses import tokenize
from rl_training.job.api.own_evaluation import policy_of
from rl_training.job.evaluation.request import read_request
from rl_training.job.evaluation.run_checkpoints import evaluate_run_checkpoints
from rl_training.models.load import load_tiny
from rl_training.records import evaluations
from rl_training.records.evaluated import read_table
from rl_training.records.files.lock import locked
from rl_training.tasks.arithmetic import arithmetic

PLAIN: dict[str, Any] = {
    "trainer_class": GRPOTrainer, "config_class": GRPOConfig, "use_cpu": True, "bf16": False,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_length": 8, "max_steps": 1,
    "save_strategy": "steps", "save_steps": 1,
}  # fmt: skip


def length(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


@pytest.mark.usefixtures("forked")
def test_the_function_gives_the_numbers_of_the_command_keeps_it_out_and_survives_a_damaged_checkpoint(
    make_trainer: Callable[..., Any], run: Path, tmp_path: Path
) -> None:
    asked = [f"run={run}", f"output={tmp_path}", "evaluation.fraction=0.02", "evaluation.responses_per_prompt=4"]
    refusals: list[str] = []

    def start_the_command(**others: Any) -> dict[str, float]:
        if not refusals:
            try:
                evaluate_run_checkpoints(prepared_evaluation(asked[0], f"output={tmp_path / 'own'}", *asked[2:]))
            except UserError as error:
                refusals.append(str(error))
        return {}

    assert len(evaluate_run_checkpoints(prepared_evaluation(*asked))) == 1
    expected_of, task = read_request(prepared_evaluation(*asked)).evaluation, arithmetic()
    trainer = make_trainer(
        **PLAIN | {"max_completion_length": expected_of.spec.options.max_completion_length},
        temperature=expected_of.spec.options.temperature,
        reward=task.reward,
        trainer_arguments={"eval_dataset": task.eval_dataset},
    )
    trainer.model.train()
    before = trained_weights(trainer)
    with pytest.raises(ValueError, match=r"\bstep 2\b"):
        evaluate(
            trainer,
            [*expected_of.spec.checkpoints.values()],
            tmp_path / "own",
            given_answer=task.given_answer,
            reward_range=task.reward_range,
            metrics={"meanwhile": start_the_command},
            fraction=0.02,
            responses_per_prompt=4,
        )
    [refusal] = refusals
    assert f"{tmp_path / 'own' / 'evaluations'} is being written to by" in refusal
    assert torch.equal(trained_weights(trainer), before)
    assert trainer.model.training
    expected, table = read_table(expected_of.folder.path), read_table(tmp_path / "own" / "evaluations" / "default")
    assert {"kl/token", "majority", "pass_at_4"} <= {*table["metric"]}
    assert table["metric"].tolist() == expected["metric"].tolist()
    assert table["value"].tolist() == expected["value"].tolist()
    assert table["stderr"].fillna(-1.0).tolist() == expected["stderr"].fillna(-1.0).tolist()


def test_an_attached_run_is_evaluated_with_weighted_rewards_and_reported_even_while_it_trains(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    needs = {"bytes": 1}

    def counted(completions: list[Any], **kwargs: Any) -> list[float]:
        torch.empty(needs["bytes"], dtype=torch.uint8)
        return length(completions)

    def make() -> GRPOTrainer:
        return make_trainer(
            **PLAIN,
            learning_rate=0.1,
            reward=[graded, counted],
            reward_weights=[2.0, -0.5],
            peft_config=LoraConfig(**LORA),
            trainer_arguments={"eval_dataset": arithmetic(num_train=8, num_eval=8).eval_dataset},
        )

    trainer, folder = make(), tmp_path / "run"
    with attach(trainer, folder, "ess"):
        trainer.train()
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"
    page = folder / "report" / "report.html"
    before = page.read_text()
    with pytest.raises(ValueError, match="has trained"):
        evaluate(trainer, checkpoint, folder)

    fresh = make()
    with locked(folder, ""):  # as a training that goes on there holds it
        table = evaluate(fresh, checkpoint, folder, greedy=False, responses_per_prompt=2).set_index("metric")
    lines = (folder / "evaluations" / "default" / "step_1" / "responses.jsonl").read_text().splitlines()
    texts = [json.loads(line)["response"] for line in lines]
    rewards = 2.0 * np.array(graded(texts)) - 0.5 * np.array(length(texts))
    assert len(texts) == 8 * 2
    assert table.loc["reward", "value"] == pytest.approx(rewards.mean())
    assert table.loc["reward", "stderr"] == pytest.approx(rewards.reshape(8, 2).mean(axis=1).std(ddof=1) / 8**0.5)
    assert table.loc["kl/token", "value"] > 0.0
    assert evaluations(folder).query("metric == 'reward'")["value"].tolist() == [table.loc["reward", "value"]]
    assert page.read_text() != before  # it now has a section on them

    with pytest.raises(ValueError, match=r"other settings.*name=NAME.*overwrite=True"):
        evaluate(fresh, checkpoint, folder, greedy=False, responses_per_prompt=3)
    again = evaluate(fresh, checkpoint, folder, greedy=False, responses_per_prompt=2, overwrite=True)
    assert again["value"].fillna(-1.0).tolist() == table["value"].fillna(-1.0).tolist()
    needs["bytes"] = 2**60
    with pytest.raises(ValueError, match=r"^step 1 failed: it ran out of memory: lower batch_size "):
        evaluate(fresh, checkpoint, folder, greedy=False, responses_per_prompt=2, name="large")
    with pytest.raises(ValueError, match=r"^name= "):  # that of all evaluations
        evaluate(fresh, checkpoint, folder, name="", overwrite=True)
    assert {*evaluations(folder)["evaluation"]} == {"default"}


def test_evaluation_renders_messages_with_the_template_of_training(make_trainer: Callable[..., Any]) -> None:
    _, tokenizer = load_tiny()
    tokenizer.chat_template = "{% if short %}1 + {% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    trainer = make_trainer(**PLAIN, processing_class=tokenizer, chat_template_kwargs={"short": True})
    prompt = [{"role": "user", "content": "2 + 3 ="}]
    ids = tokenize(policy_of(trainer, None), prompt).tolist()
    assert ids == trainer._tokenize_prompts([prompt])[0][0]
    assert tokenizer.decode(ids).startswith("1")


@pytest.mark.parametrize(
    ("options", "why"),
    [({"response_per_prompt": 2}, "did you mean responses_per_prompt"), ({}, "has no eval_dataset: give"),
     ({"k": 9}, "^k=9 is above responses_per_prompt=8"), ({"fraction": 0.0}, "^fraction=0.0 must be above 0")],
)  # fmt: skip
def test_invalid_evaluations_are_refused_as_they_are_typed_in_python_before_anything_is_written(
    make_trainer: Callable[..., Any], tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    dataset = arithmetic(num_train=8, num_eval=8).eval_dataset if options else None
    with pytest.raises(ValueError, match=why):
        evaluate(make_trainer(**PLAIN), tmp_path, tmp_path / "run", eval_dataset=dataset, **options)
    assert not (tmp_path / "run").exists()

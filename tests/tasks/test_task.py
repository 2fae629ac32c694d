"""A task whose data has no prompts is refused before anything is built on it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from datasets import Dataset

from rl_training.job.objects.make import make_task
from rl_training.tasks.task import Task

GOOD = Dataset.from_dict({"prompt": ["a", "b"]})


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (Dataset.from_dict({"question": ["a"]}), "has no column `prompt`, only question: rename"),
        (Dataset.from_dict({"prompt": ["a", None]}), "the prompt of row 1 is None: give text"),
        (Dataset.from_dict({"prompt": ["a", ""]}), "the prompt of row 1 is ''"),
        (Dataset.from_dict({"prompt": [1, 2]}), "the prompt of row 0 is 1"),
        ([{"prompt": "a"}], "give a datasets.Dataset"),
    ],
)
@pytest.mark.parametrize("split", ["train_dataset", "eval_dataset"])
def test_data_without_prompts_is_refused_with_split_and_row(split: str, data: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{split}.*{why}"):
        Task(**{"train_dataset": GOOD, "eval_dataset": GOOD, split: data}, reward=reward)


@pytest.mark.parametrize("ends", [(1.0, 0.0), (0.0, 0.0), (0.0, math.nan)])
def test_a_reward_range_without_a_range_is_refused(ends: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"^reward_range=.* must be \(lowest, highest\)"):
        Task(GOOD, GOOD, reward, reward_range=ends)


@pytest.mark.parametrize("function", ["builtins.dict", "builtins.list", "time.perf_counter"])
def test_a_function_that_returns_no_task_is_refused_with_what_to_return(function: str) -> None:
    with pytest.raises(ValueError, match=r"\bTask\(train_dataset"):
        make_task({"_target_": function})


def test_prompts_may_be_messages_and_the_evaluation_split_may_be_missing() -> None:
    messages = Dataset.from_dict({"prompt": [[{"role": "user", "content": "a"}]]})
    task = Task(messages, None, reward)
    for without_rows in (task, Task(messages, messages.select([]), reward)):
        with pytest.raises(ValueError, match=r"data\.path=FILE .*eval_dataset=…"):
            without_rows.held_out  # noqa: B018
    with pytest.raises(ValueError, match=r"^train_dataset is None"):
        Task(None, messages, reward)  # type: ignore[arg-type]

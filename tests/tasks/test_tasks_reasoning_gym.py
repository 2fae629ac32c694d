"""Claims on reasoning-gym's tasks: what they ask, what they reward, and that evaluation questions stay unseen."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from rl_training.tasks.reasoning_gym import answered_examples, reasoning_gym
from rl_training.tasks.task import Task

pytest.importorskip("reasoning_gym")

SHORT_SUMS = {"min_terms": 2, "max_terms": 3, "max_digits": 1}


@pytest.fixture(scope="module")
def sums() -> Task:
    return reasoning_gym("chain_sum", num_train=200, num_eval=30, settings=SHORT_SUMS)


def rewards(task: Task, prompt: str, *completions: str) -> list[float]:
    return task.reward(list(completions), prompts=[prompt] * len(completions))


def test_only_the_right_sum_is_rewarded(sums: Task) -> None:
    for prompt, answer in zip(sums.train_dataset["prompt"], sums.train_dataset["answer"], strict=True):
        asked = prompt.rpartition(": ")[2].removesuffix(" =<think>")
        assert set(asked) <= set("0123456789+- ")
        assert eval(asked) == int(answer)
    right = f"</think><answer>{answer}</answer>"
    wrong = f"</think><answer>{int(answer) + 1}</answer>"
    assert rewards(sums, prompt, right, wrong, answer, right + right, "") == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_an_answer_is_scored_for_the_question_of_its_own_row(sums: Task) -> None:
    rows = sums.eval_dataset[:]
    right = [f"<answer>{answer}</answer>" for answer in rows["answer"]]
    assert sums.reward(right, prompts=rows["prompt"]) == [1.0] * 30
    turned = sums.reward(right[1:] + right[:1], prompts=rows["prompt"])
    assert turned == [
        float(a == b) for a, b in zip(rows["answer"][1:] + rows["answer"][:1], rows["answer"], strict=True)
    ]


def test_a_near_miss_gets_the_packages_score() -> None:
    task = reasoning_gym("spell_backward", num_train=20, num_eval=0, settings={"min_word_len": 5, "max_word_len": 5})
    prompt, answer = task.train_dataset[0]["prompt"], task.train_dataset[0]["answer"]
    word = prompt.rpartition(": ")[2].removesuffix("<think>")
    assert answer == word[::-1]
    exact, nearly, other = rewards(task, prompt, *(f"<answer>{t}</answer>" for t in (answer, answer[:-1], "#####")))
    assert exact == 1.0
    assert 0.0 <= other < nearly < 1.0


def test_held_out_questions_are_never_in_training_with_any_seed(sums: Task) -> None:
    held_out = set(sums.eval_dataset["prompt"])
    other = reasoning_gym("chain_sum", num_train=200, num_eval=0, seed=5, settings=SHORT_SUMS)
    examples = islice(answered_examples("chain_sum", 7, SHORT_SUMS), 500)
    assert len(held_out) == 30
    assert held_out.isdisjoint([*sums.train_dataset["prompt"], *other.train_dataset["prompt"]])
    assert held_out.isdisjoint(example.prompt for example in examples)


def test_a_warm_start_example_is_rewarded(sums: Task) -> None:
    answers = dict(zip(sums.train_dataset["prompt"], sums.train_dataset["answer"], strict=True))
    asked = [
        example for example in islice(answered_examples("chain_sum", 7, SHORT_SUMS), 500) if example.prompt in answers
    ]
    assert len(asked) > 10
    assert all(rewards(sums, example.prompt, example.completion) == [1.0] for example in asked)


@pytest.mark.parametrize("task", ["gsm_symbolic", "list_functions", "word_ladder"])
def test_a_task_with_a_fixed_list_of_questions_gives_rows_like_any_other(task: str) -> None:
    """These tasks build a list of their whole size at once, or accept no size above 20 000."""
    rows = reasoning_gym(task, num_train=4, num_eval=1)
    assert len(rows.train_dataset) == 4
    prompt, answer = rows.train_dataset[0]["prompt"], rows.train_dataset[0]["answer"]
    assert rewards(rows, prompt, f"<answer>{answer}</answer>") == [1.0]


@pytest.mark.parametrize(
    ("task", "options", "said"),
    [
        ("chain_sums", {}, "data.task=chain_sums is not in reasoning-gym: use chain_sum"),
        ("chain_sum", {"settings": {"max_term": 3}}, "data.settings={'max_term': 3} do not suit"),
        ("chain_sum", {"settings": {"min_terms": 0}}, "data.settings={'min_terms': 0} do not suit"),
        ("game_of_life_halting", {}, "the package scores every answer 1: use another task"),
        ("chain_sum", {"num_train": 500, "settings": {"min_terms": 1, "max_terms": 1, "max_digits": 1}}, "has only"),
    ],
)
def test_a_mistake_in_the_settings_is_named(task: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("{", r"\{").replace("}", r"\}")):
        reasoning_gym(task, **{"num_train": 4, "num_eval": 1} | options)

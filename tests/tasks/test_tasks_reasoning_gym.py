"""Claims on reasoning-gym's tasks: what they ask, what they reward, and that evaluation questions stay unseen."""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections import Counter
from itertools import islice
from typing import Any

import pytest

from rl_training.errors import UserError
from rl_training.tasks.reasoning_gym import SOUND_TASKS, _score, reasoning_gym, worked_examples
from rl_training.tasks.task import Task

SHORT_SUMS = {"min_terms": 2, "max_terms": 3, "max_digits": 1}


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Skip where it is not installed. Each process that runs tests imports this module, so it is not asked above."""
    pytest.importorskip("reasoning_gym")


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
    examples = islice(worked_examples("chain_sum", 7, SHORT_SUMS), 500)
    assert len(held_out) == 30
    assert held_out.isdisjoint([*sums.train_dataset["prompt"], *other.train_dataset["prompt"]])
    assert held_out.isdisjoint(example.prompt for example in examples)


def test_a_warm_start_example_is_rewarded(sums: Task) -> None:
    answers = dict(zip(sums.train_dataset["prompt"], sums.train_dataset["answer"], strict=True))
    asked = [
        example for example in islice(worked_examples("chain_sum", 7, SHORT_SUMS), 500) if example.prompt in answers
    ]
    assert len(asked) > 10
    assert all(rewards(sums, example.prompt, example.completion) == [1.0] for example in asked)


# Which tasks are accepted: their score runs no text as code, ends, and pays no answer that ignores the question.

CONSTANTS = [
    "0", "1", "-1", "2", "10", "0.5", "1/2", "nan", "inf", "True", "False", "yes", "no", "A", "B", "a", "[]", "{}", "",
    "None", "0,0", "6*4*1*1", "[[0]]",
]  # fmt: skip
CODE = [
    "__import__('os').getpid()",
    "1 + __import__('os').getpid()",
    "[open('/dev/null')]",
    "{'a': [open('/dev/null')]}",
]
ENDLESS = ["9**9**9**9", "1e999999999", "exp(" * 60 + "x" + ")" * 60, "[[" * 5000, "9" * 4400, "a" * 32_000, "x**x**x"]
UNSOUND = {"countdown": "runs text", "n_queens": "runs text", "coin_flip": "pays 0", "game_of_life": "pays a board"}
LONG = {  # seconds to make 24 questions
    "arc_agi", "futoshiki", "polynomial_equations", "quantum_lock", "sokoban", "sudoku", "zebra_puzzles",
}  # fmt: skip
_code_from_text: list[str] = []


def _note_code_from_text(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: note code that does not come from a file; it cannot be removed, and costs nothing."""
    if event == "exec" and arguments[0].co_filename == "<string>":
        _code_from_text.append(arguments[0].co_filename)


def flaw_of(task: str, num_questions: int = 24, seconds: float = 1.0) -> str:
    """Return what a policy could exploit in a task's score, or ""."""
    from reasoning_gym.factory import create_dataset

    dataset = create_dataset(task, size=num_questions, seed=1)
    entries = [dataset[number] for number in range(num_questions)]
    sys.addaudithook(_note_code_from_text)
    _code_from_text.clear()
    slowest = 0.0
    for text in (*CODE, *ENDLESS):
        started = time.process_time()
        _score(dataset, entries[0], text)
        slowest = max(slowest, time.process_time() - started)
    if _code_from_text:
        return "runs text as code"
    if slowest > seconds:
        return f"took {slowest:.1f} s for one answer"
    if any(_score(dataset, entry, str(entry["answer"])) < 1.0 for entry in entries):
        return "does not pay its own answer"
    answers: dict[str, list[str]] = {text: [text] * num_questions for text in CONSTANTS}
    right = Counter(str(entry["answer"]) for entry in entries)
    answers |= {text: [text] * num_questions for text, _ in right.most_common(3)}
    questions = [entry["question"].strip() for entry in entries]
    answers["the question"] = questions
    answers["its last line"] = [question.rpartition("\n")[2] for question in questions]
    answers["what follows its last colon"] = [question.rpartition(":")[2].strip() for question in questions]
    answers["its last paragraph"] = [question.rpartition("\n\n")[2] for question in questions]
    answers["its first number"] = [re.findall(r"-?[0-9.]*[0-9]|$", question)[0] for question in questions]
    answers["its last word"] = [question.split()[-1] for question in questions]
    for name, texts in answers.items():
        paid = statistics.mean(_score(dataset, entry, text) for entry, text in zip(entries, texts, strict=True))
        if paid > 0.5:
            return f"pays {name!r:.40} {paid:.2f} on average"
    return ""


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=pytest.mark.slow) if task in LONG else task for task in sorted(SOUND_TASKS)]
)
def test_an_accepted_task_cannot_be_exploited(task: str) -> None:
    assert flaw_of(task) == ""


@pytest.mark.parametrize("task", UNSOUND)
def test_a_task_that_can_be_exploited_is_refused_by_name(task: str) -> None:
    with pytest.raises(UserError, match=f"data.task={task}: .*score"):
        reasoning_gym(task)


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
        ("chain_sums", {}, "data.task=chain_sums .*chain_sum"),
        ("chain_sum", {"settings": {"max_term": 3}}, "data.settings={'max_term': 3} do not suit"),
        ("chain_sum", {"settings": {"min_terms": 0}}, "data.settings={'min_terms': 0} do not suit"),
        ("chain_sum", {"num_train": 500, "settings": {"min_terms": 1, "max_terms": 1, "max_digits": 1}}, "has only"),
    ],
)
def test_a_mistake_in_the_settings_is_named(task: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("{", r"\{").replace("}", r"\}")):
        reasoning_gym(task, **{"num_train": 4, "num_eval": 1} | options)

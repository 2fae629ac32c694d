"""Text from a model in reasoning-gym's tasks is scored as the package does, and none of it is executed."""

from __future__ import annotations

import logging
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rl_training.tasks import gym_score
from rl_training.tasks.gym_score import AnswerScores, open_dataset

DATASETS = pytest.importorskip("reasoning_gym.factory").DATASETS
DatasetSpec = pytest.importorskip("reasoning_gym.composite").DatasetSpec
# Tasks that need seconds to make their first question or to load their word lists.
LONG = {
    "acre", "arc_agi", "codeio", "figlet_font", "group_anagrams", "knight_swap", "quantum_lock", "word_ladder",
    "zebra_puzzles",
}  # fmt: skip
TASKS = [
    pytest.param(task, marks=pytest.mark.slow) if task in LONG else task
    for task in sorted(set(DATASETS) - {"game_of_life_halting"})  # refused, because it rewards any answer
]
SETTINGS: dict[str, dict[str, Any]] = {
    "composite": {"datasets": [DatasetSpec("countdown", 1.0, {})]},
    "futoshiki": {"max_board_size": 4},  # small, so that questions are made quickly
    "sokoban": {"max_w": 6, "max_h": 6},
}
CODE = [
    "__import__('os').system('touch FILE')",
    "1 + __import__('os').system('touch FILE') + 2",
    "[open('FILE', 'w')]",
    "(lambda: open('FILE', 'w'))()",
    "f\"{open('FILE', 'w')}\"",
    "S(\"open('FILE', 'w')\")",
    "x.__class__.__init__.__globals__['sys'].modules['os'].system('touch FILE')",
    "1 if open('FILE', 'w') else 2",
    "{\"a\": [open('FILE', 'w')]}",
]
ENDLESS = ["9**9**9**9", "1e999999999", "∧" * 30_000, "exp(" * 60 + "x" + ")" * 60]
ODD = [
    "", "\x00", "\ud800", "nan", "inf", "-1", "[NaN]", "1/0", "9" * 4400, "[[" * 5000, "(" * 150 + "1" + ")" * 150,
    "1+" * 4000 + "1", "a" * 1_000_000, '{"a":' * 3000, "[0]*10**10", "x**x**x**x", "a,b\n1:2=3 × 4", "٣", "\n" * 9999,
]  # fmt: skip


@cache
def entry_of(task: str) -> tuple[Any, dict[str, Any]]:
    dataset = open_dataset(task, 0, SETTINGS.get(task, {}), size=50)
    return dataset, dataset[0]


def score(task: str, *answers: str | None) -> list[float]:
    _, entry = entry_of(task)
    return AnswerScores(task, 0, SETTINGS.get(task, {})).scores([(entry, answer) for answer in answers])


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_score, "DEADLINE_SECONDS", 0.5)


@pytest.mark.parametrize("task", TASKS)
def test_hostile_text_is_scored_quickly_without_running_code(
    task: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry_of(task)
    gym_score._worker.start()
    texts = [text.replace("FILE", str(tmp_path / "canary")) for text in CODE] + ENDLESS + ODD
    started = time.monotonic()
    scores = score(task, *texts, None)
    assert time.monotonic() - started < 20.0  # two or three deadlines at most, on a busy machine
    assert all(0.0 <= value <= 1.0 for value in scores)
    assert list(tmp_path.iterdir()) == []
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) <= 2
    assert not any("evaluates text" in line for line in said)  # the package's functions that evaluate text are replaced


@pytest.mark.parametrize("task", TASKS)
def test_the_reference_answer_and_an_empty_one_get_the_packages_scores(task: str) -> None:
    dataset, entry = entry_of(task)
    answers = [None if entry["answer"] is None else str(entry["answer"]), None, ""]
    assert score(task, *answers) == [dataset.score_answer(answer, entry) for answer in answers]


# The nine tasks whose scores evaluate text in the package.


def test_an_expression_is_scored_by_its_value_and_the_numbers_in_it() -> None:
    _, entry = entry_of("countdown")
    right = entry["answer"]
    assert score("countdown", right, f" ({right}) ", f"-(-({right}))", f"({right})*1") == [1.0, 1.0, 1.0, 0.05]
    target, numbers = entry["metadata"]["target"], " ".join(str(number) for number in entry["metadata"]["numbers"])
    hiding = [f"{bin(target)} # {numbers}", f"{bin(target)}, {numbers}", f"{target}.0e0", "log(E)", f"{right} + 0*pi"]
    assert max(score("countdown", *hiding)) <= 0.05
    assert score("puzzle24", entry_of("puzzle24")[1]["answer"], "24", "4*6", "4*6*(5-4)", "(3/1)*8*1") == [
        1.0, 0.01, 0.01, 1.0, 1.0,
    ]  # fmt: skip


def test_an_antiderivative_is_right_in_any_form_but_not_as_an_integral_sign() -> None:
    dataset = open_dataset("simple_integration", 3, {}, size=50)
    entry = dataset[0]
    right, unknown = entry["answer"].removesuffix(" + C"), entry["metadata"]["variable"]
    answers = [
        right,
        f"({right})*2/2 + 17",
        f"{right} + C + sin({unknown})**2 + cos({unknown})**2",
        f"{right} + {unknown}",
    ]
    answers += [f"2*({right})", f"Integral({entry['metadata']['integrand']}, {unknown})", f"{right} + D", "0"]
    scores = AnswerScores("simple_integration", 3, {}).scores([(entry, answer) for answer in answers])
    assert scores == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def test_an_antiderivative_is_right_for_each_kind_of_question() -> None:
    """These are the package's own antiderivatives from sympy's integrate, with all functions that may occur."""
    answers = AnswerScores("intermediate_integration", 1, {})
    dataset = open_dataset("intermediate_integration", 1, {}, size=50)
    entries = [dataset[number] for number in range(12)]
    solved = [entry for entry in entries if "Integral(" not in entry["answer"]]
    assert len({entry["metadata"]["problem_type"] for entry in solved}) >= 5
    assert answers.scores([(entry, entry["answer"]) for entry in solved]) == [1.0] * len(solved)
    assert answers.scores([(entry, f"{entry['answer']} + x/9") for entry in solved]) == [0.0] * len(solved)


def test_an_expanded_product_of_polynomials_is_right() -> None:
    _, entry = entry_of("polynomial_multiplication")
    right = entry["answer"]
    assert score("polynomial_multiplication", right, f"0 + {right}", f"{right} + 1") == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("task", "worth"), [("binary_matrix", 0.1), ("n_queens", 0.5), ("spiral_matrix", 0.1), ("string_insertion", 0.1)]
)
def test_a_list_in_python_notation_gets_the_packages_score(task: str, worth: float) -> None:
    _, entry = entry_of(task)
    right = entry["answer"]
    if task in ("binary_matrix", "n_queens"):
        rows = [row.split() for row in right.split("\n")]
        as_list = str([[int(cell) for cell in row] for row in rows]) if task == "binary_matrix" else str(rows)
    else:
        as_list = str(right.split() if task == "spiral_matrix" else list(right))
    assert score(task, right, as_list, f"list({as_list})", f"{as_list} + []") == [1.0, worth, 0.0, 0.0]


# What cannot be scored.


def test_an_answer_on_which_the_packages_score_fails_gets_zero_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, entry = entry_of("prime_factorization")
    answers = AnswerScores("prime_factorization", 0, {})
    for _ in range(2):
        assert answers.scores([(entry, "two × three"), (entry, "\x1b[31m"), (entry, entry["answer"])]) == [
            0.0,
            0.0,
            1.0,
        ]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("data.task=prime_factorization: the package's score of 'two × three' failed (ValueError")
    assert score("complex_arithmetic", "nan", "nan+1j") == [0.0, 0.0]  # Python's min(1, nan) is 1


def test_an_answer_that_takes_too_long_gets_zero_and_others_their_score(caplog: pytest.LogCaptureFixture) -> None:
    right = entry_of("coin_flip")[1]["answer"]
    assert score("coin_flip", "1e999999999", right, "1" * 40_000, None) == [0.0, 1.0, 0.0, 0.0]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "data.task=coin_flip: 2 of 4 answers score 0: longer than 32768 characters, or not scored in"
    )

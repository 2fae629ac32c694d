"""Procedural tasks of the package reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760), generated locally.

A row's prompt is the package's question followed by `<think>`. The reward is the package's own score, from 0 to 1, for
the content of a completion's only `<answer>…</answer>`. Many tasks score a near miss above 0.

A policy learns whatever is rewarded, and its text is scored in the trainer's own process. So only the tasks in
`SOUND_TASKS` are accepted: their scores run no text as code, end, and pay neither the question's own text nor any
constant answer more than a half on average. test_tasks_reasoning_gym.py checks each of them.

The package's questions 0, 1, … for a seed become training rows or held-out rows by a checksum of their text
(`is_held_out`), so no seed ever trains on a prompt of the evaluation. Duplicate questions are skipped.

Tasks with short questions and answers suit a tiny model, which `python -m rl_training.job.make_tiny --task NAME` makes.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from datasets import Dataset

from rl_training.errors import UserError, require_extra
from rl_training.options import check_whole
from rl_training.tasks.answers import only_answer
from rl_training.tasks.task import Task, WorkedExample, draw_splits, is_held_out

logger = logging.getLogger(__name__)

SOUND_TASKS = {
    "ab", "advanced_geometry", "aiw", "arc_1d", "arc_agi", "base_conversion", "basic_arithmetic",
    "binary_alternation", "caesar_cipher", "calendar_arithmetic", "chain_sum", "codeio", "color_cube_rotation",
    "count_bits", "count_primes", "cryptarithm", "decimal_arithmetic", "decimal_chain_sum", "dice", "emoji_mystery",
    "family_relationships", "figlet_font", "fraction_simplification", "futoshiki", "gcd", "group_anagrams",
    "gsm_symbolic", "jugs", "kakurasu", "knights_knaves", "largest_island", "lcm", "leg_counting", "letter_counting",
    "letter_jumble", "list_functions", "mahjong_puzzle", "manipulate_matrix", "maze", "mini_sudoku", "modulo_grid",
    "needle_haystack", "number_filtering", "number_format", "number_sequence", "number_sorting",
    "palindrome_generation", "palindrome_partitioning", "path_star", "polynomial_equations", "pool_matrix",
    "power_function", "products", "quantum_lock", "rearc", "rectangle_count", "rotate_matrix", "rotten_oranges",
    "self_reference", "sentence_reordering", "shortest_path", "simple_equations", "simple_geometry", "sokoban",
    "spell_backward", "string_splitting", "string_synthesis", "sudoku", "survo", "tower_of_hanoi", "tsumego",
    "word_ladder", "word_sequence_reversal", "zebra_puzzles",
}  # fmt: skip
MAX_CHARS = 32_768  # of an answer; the longest right answers have a thousand
_NUM_QUESTIONS = 20_000  # number of questions, for the few tasks that need one; word_ladder accepts no more
_MAX_DRAWS = 20  # draws per requested row; a task with few questions mostly draws duplicates


def reasoning_gym(
    task: str, num_train: int = 4096, num_eval: int = 512, seed: int = 0, settings: Mapping[str, Any] | None = None
) -> Task:
    """Make a task of reasoning-gym: `num_train` training and `num_eval` held-out questions, without duplicates.

    Args:
        task: Name of the task in reasoning-gym.
        num_train: Number of training questions.
        num_eval: Number of held-out questions.
        seed: Seed of the questions.
        settings: Settings of that task, named as in its configuration: {"min_terms": 2, "max_digits": 1}.

    Raises:
        ImportError: If the package is not installed.
        UserError: For an unknown, an unsound task or an unknown setting, or if the task has fewer questions than
            requested.
    """
    check_whole("data.num_train", num_train, 0)
    check_whole("data.num_eval", num_eval, 0)
    dataset = _open_dataset(task, seed, settings or {})
    wanted = {False: num_train, True: num_eval}
    draws = ((_prompt(entry), entry) for entry in _entries(dataset))
    rows = draw_splits(draws, wanted, _MAX_DRAWS * (num_train + num_eval))
    if any(len(rows[split]) < wanted[split] for split in rows):
        raise UserError(
            f"data.task={task} has only {len(rows[False])} training and {len(rows[True])} held-out questions under "
            f"these settings: ask for fewer by data.num_train and data.num_eval, or widen data.settings"
        )
    entries = rows[False] | rows[True]

    def reasoning_gym_reward(completions: list[str], prompts: list[str], **kwargs: Any) -> list[float]:
        pairs = zip(completions, prompts, strict=True)
        return [_score(dataset, entries[prompt], only_answer(text)) for text, prompt in pairs]

    train, held_out = (
        Dataset.from_dict(
            {"prompt": list(split_rows), "answer": [str(entry["answer"]) for entry in split_rows.values()]}
        )
        for split_rows in rows.values()
    )
    return Task(train, held_out, reasoning_gym_reward, only_answer, (0.0, 1.0))


def worked_examples(task: str, seed: int, settings: Mapping[str, Any] | None = None) -> Iterator[WorkedExample]:
    """Yield training questions of a task with the package's answers, endlessly, for the warm start of a tiny model."""
    dataset = _open_dataset(task, seed, settings or {})
    while True:
        for entry in _entries(dataset):
            if entry["answer"] is None:
                raise UserError(f"task={task} gives no answers to learn from: use another task")
            if not is_held_out(_prompt(entry)):
                yield WorkedExample(_prompt(entry), f"</think><answer>{entry['answer']}</answer>")


def _open_dataset(task: str, seed: int, settings: Mapping[str, Any]) -> Any:
    """Return the package's dataset of a task. Raise UserError for an unknown or unsound task, or an unknown setting."""
    with require_extra():
        from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        close = difflib.get_close_matches(task, SOUND_TASKS)
        raise UserError(f"data.task={task} is not in reasoning-gym: use {' or '.join(close or sorted(SOUND_TASKS))}")
    if task not in SOUND_TASKS:
        raise UserError(
            f"data.task={task}: the package's score of this task runs text as code, may not end, or pays a constant "
            f"answer: use one of {', '.join(sorted(SOUND_TASKS))}"
        )
    try:
        return create_dataset(task, size=_NUM_QUESTIONS, seed=seed, **settings)
    except (TypeError, AssertionError, AttributeError) as error:  # an unknown setting, or a value that the task refuses
        raise UserError(f"data.settings={dict(settings)} do not suit data.task={task}: {error}") from error


def _score(dataset: Any, entry: Mapping[str, Any], answer: str | None) -> float:
    """Return the package's score of an answer, from 0 to 1; 0 if its scoring raises an error, which is logged."""
    if answer is not None and len(answer) > MAX_CHARS:
        return 0.0
    try:
        score = float(dataset.score_answer(answer, entry))
    except Exception as error:  # the package's scoring did not expect such a text
        _warn_once(type(dataset).__name__, type(error).__name__)
        return 0.0
    return min(score, 1.0) if score >= 0.0 else 0.0  # spell_backward can score 1.0000000000000002; nan is no score


@functools.cache
def _warn_once(dataset: str, error: str) -> None:
    logger.warning("%s: the package's scoring of an answer failed (%s): such answers score 0", dataset, error)


def _entries(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield the package's entries 0, 1, …, endlessly for most tasks."""
    for number in count():
        try:
            entry = dataset[number]
        except IndexError:
            return
        yield entry


def _prompt(entry: Mapping[str, Any]) -> str:
    return f"{entry['question']}<think>"

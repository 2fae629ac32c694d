"""Procedural tasks of the package reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760), generated locally.

A row's prompt is the package's question followed by `<think>`. The reward is the package's own score, from 0 to 1, for
the content of a completion's only `<answer>…</answer>`, computed in a guarded process (gym_score.py). Many tasks score
a near miss above 0.

The package's questions 0, 1, … for a seed become training rows or held-out rows by a checksum of their text
(`is_held_out`), so no seed ever trains on a prompt of the evaluation. Duplicate questions are skipped.

Tasks with short questions and answers suit a tiny model, which `python -m rl_training.tasks.tiny --task NAME` makes.
"""

from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

from datasets import Dataset

from rl_training.errors import UserError
from rl_training.tasks.arithmetic import given_answer
from rl_training.tasks.gym_score import AnswerScores, open_dataset
from rl_training.tasks.task import Task, WorkedExample, is_held_out

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
        UserError: For an unknown task or setting, or if the task has fewer questions than requested.
    """
    rows: dict[bool, dict[str, Any]] = {False: {}, True: {}}  # by whether held out: the package's entries by prompt
    wanted = {False: num_train, True: num_eval}
    for entry in islice(_entries(task, seed, settings or {}), _MAX_DRAWS * (num_train + num_eval)):
        prompt = _prompt(entry)
        split_rows = rows[is_held_out(prompt)]
        if len(split_rows) < wanted[is_held_out(prompt)]:
            split_rows.setdefault(prompt, entry)
        elif all(len(rows[split]) == wanted[split] for split in rows):
            break
    if any(len(rows[split]) < wanted[split] for split in rows):
        raise UserError(
            f"data.task={task} has only {len(rows[False])} training and {len(rows[True])} held-out questions under "
            f"these settings: ask for fewer by data.num_train and data.num_eval, or widen data.settings"
        )
    entries = rows[False] | rows[True]
    answers = AnswerScores(task, seed, settings or {})

    def reasoning_gym_reward(completions: list[str], prompts: list[str], **kwargs: Any) -> list[float]:
        pairs = zip(completions, prompts, strict=True)
        return answers.scores([(entries[prompt], given_answer(text)) for text, prompt in pairs])

    train, held_out = (
        Dataset.from_dict(
            {"prompt": list(split_rows), "answer": [str(entry["answer"]) for entry in split_rows.values()]}
        )
        for split_rows in rows.values()
    )
    return Task(train, held_out, reasoning_gym_reward, given_answer, (0.0, 1.0))


def answered_examples(task: str, seed: int, settings: Mapping[str, Any] | None = None) -> Iterator[WorkedExample]:
    """Yield training questions of a task with the package's answers, endlessly, for the warm start in tiny.py."""
    while True:
        for entry in _entries(task, seed, settings or {}):
            if entry["answer"] is None:
                raise UserError(f"task={task} gives no answers to learn from: use another task")
            if not is_held_out(_prompt(entry)):
                yield WorkedExample(_prompt(entry), f"</think><answer>{entry['answer']}</answer>")


def _entries(task: str, seed: int, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the package's entries 0, 1, …, endlessly for most tasks."""
    dataset = open_dataset(task, seed, settings, _NUM_QUESTIONS)
    for number in count():
        try:
            entry = dataset[number]
        except IndexError:
            return
        yield entry


def _prompt(entry: Mapping[str, Any]) -> str:
    return f"{entry['question']}<think>"

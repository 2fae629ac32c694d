"""Procedural tasks of the package reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760), made on the spot.

A row's prompt is the package's question and `<think>`; the reward is the package's own score, from 0 to 1, of what the
one `<answer>…</answer>` of a completion holds, taken in a guarded process (gym_score.py). Many tasks score a near miss
above 0.

The questions of the package's item 0, 1, … under a seed become training rows or held-out rows by a checksum of their
text (`is_held_out`), so that no seed ever trains on what evaluation asks. Repeated questions are skipped.

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

_SIZE = 20_000  # questions of the few tasks that do not make as many as they are asked for; word_ladder takes no more
_TRIES = 20  # draws for each row that is asked for, most of which find no new question where there are few


def reasoning_gym(
    task: str, num_train: int = 4096, num_eval: int = 512, seed: int = 0, settings: Mapping[str, Any] | None = None
) -> Task:
    """Make the task of that name in reasoning-gym: `num_train` training, `num_eval` held-out questions, none twice.

    Args:
        settings: of that task, as its configuration in the package names them: {"min_terms": 2, "max_digits": 1}

    Raises ImportError without the package, and UserError for a name or a setting that it does not know, and where the
    task has fewer questions than rows are asked for.
    """
    rows: dict[bool, dict[str, Any]] = {False: {}, True: {}}  # by held out: the package's entry of each prompt
    wanted = {False: num_train, True: num_eval}
    for entry in islice(_entries(task, seed, settings or {}), _TRIES * (num_train + num_eval)):
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
    """Yield training questions of a task with the package's answer, without end: for a warm start, see tiny.py."""
    while True:
        for entry in _entries(task, seed, settings or {}):
            if entry["answer"] is None:
                raise UserError(f"task={task} gives no answers to learn from: use another task")
            if not is_held_out(_prompt(entry)):
                yield WorkedExample(_prompt(entry), f"</think><answer>{entry['answer']}</answer>")


def _entries(task: str, seed: int, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the package's entries 0, 1, …, without end for most tasks."""
    dataset = open_dataset(task, seed, settings, _SIZE)
    for number in count():
        try:
            entry = dataset[number]
        except IndexError:
            return
        yield entry


def _prompt(entry: Mapping[str, Any]) -> str:
    return f"{entry['question']}<think>"

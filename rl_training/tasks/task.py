"""The interface of a task: what is asked (two datasets) and what an answer is worth (a reward)."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from datasets import Dataset

from rl_training.errors import UserError

_HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Task:
    """A dataset with its reward; `train_dataset` and `eval_dataset` share columns and no prompt.

    The reward takes what TRL hands to a reward function and returns one number per completion; TRL logs it as
    `rewards/<name of the function>/mean`.

    Raises ValueError where a dataset is none, or lacks prompts.

    Example: `GRPOTrainer(model, reward_funcs=task.reward, train_dataset=task.train_dataset, ...)`.
    """

    train_dataset: Dataset  # column `prompt` (plain text), and the columns that the reward reads
    eval_dataset: Dataset  # the same columns, held-out prompts
    reward: Callable[..., list[float]]  # reward(completions, **columns); its __name__ is the metric's name
    # what evaluation counts as one vote: the answer that the reward reads from a text, None where it reads none
    given_answer: Callable[[str], str | None] | None = None
    reward_range: tuple[float, float] | None = None  # the least and the most that a response can earn; None: not known

    def __post_init__(self) -> None:
        for name in ("train_dataset", "eval_dataset"):
            dataset = getattr(self, name)
            if dataset is not None:
                _refuse_without_prompts(name, dataset)


def as_task(returned: object) -> Task:
    """Return what the function of a task has returned.

    Raises:
        UserError: where that is no task.
    """
    if not isinstance(returned, Task):
        raise UserError(
            f"data: the task's function returned {returned!r:.60}, which is no Task: return "
            "Task(train_dataset, eval_dataset, reward) of rl_training.tasks.task"
        )
    return returned


def _refuse_without_prompts(name: str, dataset: object) -> None:
    if not isinstance(dataset, Dataset):
        raise UserError(f"{name} is {dataset!r:.60}: give a datasets.Dataset, such as Dataset.from_list(rows)")
    if "prompt" not in dataset.column_names:
        raise UserError(f"{name} has no column `prompt`, only {', '.join(dataset.column_names)}: rename the right one")
    for row, prompt in enumerate(dataset["prompt"]):
        if not prompt or not isinstance(prompt, str | list):
            raise UserError(
                f"{name}: the prompt of row {row} is {prompt!r}: give text, or a list of messages; leave out rows "
                "without one"
            )


@dataclass(frozen=True)
class WorkedExample:
    """A prompt and a right completion of it, without the end-of-sequence token."""

    prompt: str
    completion: str


def is_held_out(prompt: str) -> bool:
    """Return whether a made-up prompt belongs to evaluation: one in eight, by a checksum of its text, not by a seed."""
    return zlib.crc32(prompt.encode()) % _HELD_OUT_ONE_IN == 0

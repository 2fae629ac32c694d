"""The interface of a task: two datasets of prompts and a reward for the responses."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

from datasets import Dataset

from rl_training.errors import UserError
from rl_training.options import check_whole

Row = TypeVar("Row")
_HELD_OUT_ONE_IN = 8
_MAX_DRAWS = 200  # draws per requested row; all of n equally likely texts take about n log n draws


@dataclass(frozen=True)
class Task:
    """Datasets and their reward. `train_dataset` and `eval_dataset` have the same columns and no prompt in common.

    The reward has TRL's signature of a reward function and returns one number per completion. TRL logs its mean as
    `rewards/<name of the function>/mean`.

    Raises:
        UserError: If a dataset is not a datasets.Dataset, or lacks prompts, or no reward is in `reward_range`.

    Example: `GRPOTrainer(model, reward_funcs=task.reward, train_dataset=task.train_dataset, ...)`.
    """

    train_dataset: Dataset  # column `prompt` (text or messages), and the columns that the reward reads
    eval_dataset: Dataset | None  # the same columns, with held-out prompts; None: nothing can be evaluated
    reward: Callable[..., list[float]]  # reward(completions, **columns); its __name__ becomes the metric's name
    # returns the answer that the reward reads from a response, which is one vote in evaluation; None if there is none
    given_answer: Callable[[str], str | None] | None = None
    reward_range: tuple[float, float] | None = None  # lowest and highest possible reward; None: unknown

    def __post_init__(self) -> None:
        _refuse_without_prompts("train_dataset", self.train_dataset)
        if self.eval_dataset is not None:
            _refuse_without_prompts("eval_dataset", self.eval_dataset)
        if self.reward_range is not None and not self.reward_range[0] < self.reward_range[1]:
            raise UserError(f"reward_range={self.reward_range} must be (lowest, highest): give None if it is not known")

    @property
    def held_out(self) -> Dataset:
        """The evaluation split. Raises UserError if there is none, or it has no rows."""
        if self.eval_dataset is None or len(self.eval_dataset) == 0:
            raise UserError("the evaluation split has no rows: give data of your own, data.path=FILE or eval_dataset=…")
        return self.eval_dataset


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


class WorkedExample(NamedTuple):
    """A prompt and a right completion, without the end-of-sequence token."""

    prompt: str
    completion: str


def is_held_out(text: str) -> bool:
    """Return whether a generated row is held out: one in eight is, whatever the seed.

    Args:
        text: What the row is known by, equal for equal rows: its prompt, or what its prompt is made of.
    """
    return zlib.crc32(text.encode()) % _HELD_OUT_ONE_IN == 0


def draw_splits(
    draws: Iterator[tuple[str, Row]], wanted: Mapping[bool, int], max_draws: int
) -> dict[bool, dict[str, Row]]:
    """Return the first rows with different texts that are drawn for each split; fewer than wanted if draws run out.

    Args:
        draws: Draws of a row and its text.
        wanted: By split, True for the rows whose text `is_held_out`: how many rows to return.
        max_draws: How many draws to look at.

    Returns:
        By split, the rows by text.
    """
    splits: dict[bool, dict[str, Row]] = {split: {} for split in wanted}
    for text, row in islice(draws, max_draws):
        split = is_held_out(text)
        if len(splits.get(split, ())) < wanted.get(split, 0):
            splits[split].setdefault(text, row)
        if all(len(splits[split]) == number for split, number in wanted.items()):
            break
    return splits


def distinct_rows(draws: Iterator[tuple[str, Row]], num_rows: int, *, held_out: bool) -> dict[str, Row]:
    """Return the first `num_rows` rows with different texts that are drawn for one split, by text.

    Args:
        draws: Random draws of a row and its text, endless.
        num_rows: How many rows to return.
        held_out: Whether to return rows whose text `is_held_out`, or the others.

    Raises:
        UserError: If `num_rows` is no number of rows, or there are fewer texts, which shows in draws that bring nothing
            new.
    """
    setting = "data.num_eval" if held_out else "data.num_train"
    check_whole(setting, num_rows, 0)
    max_draws = _MAX_DRAWS * num_rows
    rows = draw_splits(draws, {held_out: num_rows}, max_draws)[held_out]
    if len(rows) < num_rows:
        raise UserError(
            f"{setting}={num_rows}: {max_draws} draws gave only {len(rows)} different prompts under these settings: "
            f"ask for fewer by {setting}"
        )
    return rows

r"""GSM8K: grade-school word problems whose answer is one number (Cobbe et al. 2021, arXiv:2110.14168).

The data comes from the Hugging Face Hub, or from a local copy of its JSON lines,
`{"question": "…", "answer": "… #### 18"}`. Prompts are plain text for base models, without a chat template, and ask to
think first and then answer, as in DeepSeek-R1 (arXiv:2501.12948).

An answer is right if it is the number and nothing else: `18`, `$18.00`, `1,080`, `18%`, `18.`. Units, words, arithmetic
and LaTeX score 0: a policy learns whatever is rewarded, and no list of harmless words would be complete. Numbers are
compared exactly, as fractions.
"""

from __future__ import annotations

import json
import logging
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from rl_training.errors import UserError
from rl_training.tasks.answers import last_answer
from rl_training.tasks.task import Task

logger = logging.getLogger(__name__)

_INSTRUCTION = (
    "A user asks an assistant a question that has one number as its answer. The assistant first works it out "
    "step by step inside <think> </think>, and then gives the number, with nothing else, inside "
    "<answer> </answer>."
)
_THOUGHT = "Assistant: <think>"
_HELD_OUT_SHARE = 0.05  # of the rows, if there is only one file
_MAX_CHARS = 200  # enough for any number
_NUMBER = re.compile(
    r"(?P<sign>-?) \$? (?P<digits> (?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+) (?:\.[0-9]+)? | \.[0-9]+ ) %? \.?", re.VERBOSE
)


def gsm8k(path: str | None = None, name: str = "openai/gsm8k", config: str = "main") -> Task:
    """Read the GSM8K task, from `path` if given, otherwise from the Hugging Face Hub.

    Rows are not shuffled, so all ranks see the same split. Training rows whose prompt is also held out are dropped,
    with a warning.

    Args:
        path: A folder with `train.jsonl` and `test.jsonl`, or one JSON-lines file, whose last 5 % (at least one row)
            are then held out.
        name: Name of the dataset on the Hub.
        config: Configuration of the dataset on the Hub.

    Raises:
        UserError: If the data is not available or not valid; the message names file and line.
    """
    if path is None:
        train, held_out = _hub_rows(name, config)
    elif (place := Path(path).expanduser()).is_dir():
        train = _file_rows(place / "train.jsonl")
        held_out = _file_rows(place / "test.jsonl")
    else:
        rows = _file_rows(place)
        if len(rows) < 2:
            raise UserError(f"{place} has one row: training and evaluation need one each")
        cut = len(rows) - max(1, round(_HELD_OUT_SHARE * len(rows)))
        train = rows[:cut]
        held_out = rows[cut:]
    held_out_prompts = {row["prompt"] for row in held_out}
    unseen = [row for row in train if row["prompt"] not in held_out_prompts]
    if not unseen:
        raise UserError(f"{path or name} leaves no training row: every prompt of the training rows is also held out")
    if len(unseen) < len(train):
        logger.warning("%d training rows are left out: their prompts are held out", len(train) - len(unseen))
    return Task(Dataset.from_list(unseen), Dataset.from_list(held_out), gsm8k_reward, given_answer, (0.0, 1.0))


def gsm8k_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    r"""Return 1.0 for each completion whose last complete `<answer>…</answer>` is the row's number, otherwise 0.0.

    >>> gsm8k_reward([r"… </think> <answer>$1,000.00</answer>", "<answer>1000 eggs</answer>"], answer=["1000", "1000"])
    [1.0, 0.0]
    """
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        number = parse_number(right)
        if number is None:
            raise UserError(f"the column `answer` must hold numbers, not {right!r}: use the datasets of gsm8k()")
        given = last_answer(completion)
        rewards.append(float(given is not None and parse_number(given) == number))
    return rewards


def parse_number(text: str) -> Fraction | None:
    r"""Return the exact value of a number in ASCII digits, or None for any other text.

    A sign, thousands separators, a dollar sign, a percent sign and a full stop are allowed; both signs are ignored, as
    GSM8K's own answers ignore them.

    >>> [str(parse_number(text)) for text in ("-$1,000.50", "18%", "18.", "18 eggs", "36/2")]
    ['-2001/2', '18', '18', 'None', 'None']
    """
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= _MAX_CHARS else None
    return None if match is None else Fraction(match["sign"] + match["digits"].replace(",", ""))


def given_answer(completion: str) -> str | None:
    """Return the answer that the reward reads: numbers in one spelling (18 for $18.00), other text unchanged."""
    given = last_answer(completion)
    number = None if given is None else parse_number(given)
    return given if number is None else str(number)


def _hub_rows(name: str, config: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    try:
        splits = load_dataset(name, config)
    except OSError as error:  # no network, no such dataset and no access all raise OSError
        raise UserError(
            f"the dataset {name} ({config}) could not be loaded: {error}; without a network, or with data of your own, "
            "give data.path=FILE.jsonl, lines of {'question': …, 'answer': '… #### 18'}"
        ) from error
    missing = {"train", "test"} - splits.keys()
    if missing:
        raise UserError(
            f"the dataset {name} ({config}) has no split {' and no split '.join(sorted(missing))}, only "
            f"{', '.join(splits)}: save its rows as JSON lines and give data.path=FILE.jsonl, of which 5 % are held out"
        )
    train, held_out = (
        [_row(record, f"{name}, {split}, row {index}") for index, record in enumerate(splits[split])]
        for split in ("train", "test")
    )
    return train, held_out


def _file_rows(file: Path) -> list[dict[str, str]]:
    if not file.is_file():
        raise UserError(
            f"{file} does not exist: give data.path=FILE.jsonl, or a folder with train.jsonl and test.jsonl"
        )
    rows = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():  # files often end with an empty line
                continue
            where = f"{file}, line {number}"
            try:
                rows.append(_row(json.loads(line), where))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise UserError(f"{where} is not JSON ({error}); write one object on each line") from error
    if not rows:
        raise UserError(f"{file} has no rows: give data.path=FILE.jsonl with a question and its answer on each line")
    return rows


def _row(record: Any, where: str) -> dict[str, str]:
    fields = record if isinstance(record, dict) else {}
    missing = [field for field in ("question", "answer") if not isinstance(fields.get(field), str)]
    if missing:
        raise UserError(f"{where} has no text `{missing[0]}`; write {{'question': …, 'answer': '… #### 18'}}")
    _, mark, number = record["answer"].rpartition("####")
    if not mark or parse_number(number) is None:
        raise UserError(f"{where}: `answer` must end with #### and a number, such as '#### 18'")
    prompt = f"{_INSTRUCTION}\n\nUser: {record['question'].strip()}\n{_THOUGHT}"
    return {"prompt": prompt, "answer": number.strip()}

r"""GSM8K: grade-school word problems whose answer is one number (Cobbe et al. 2021, arXiv:2110.14168).

Data: the dataset of that name on the Hugging Face Hub, or a local copy of its JSON lines,
`{"question": "…", "answer": "… #### 18"}`. Prompts are plain text for base models, without a chat template, in the
manner of DeepSeek-R1 (arXiv:2501.12948): think first, then answer.

Numbers are compared exactly: first as fractions read by a regular expression (`18`, `$1,000.50`, `18 dollars`,
`36/2`); anything else goes to math_verify (`\frac{36}{2}`, `x = 18`), in a process of its own (math_check.py).
"""

import importlib.util
import json
import logging
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from rl_training.tasks.math_check import INSTALL, MAX_CHARS, are_equal
from rl_training.tasks.task import Task

logger = logging.getLogger(__name__)

_INSTRUCTION = (
    "A user asks an assistant a question that has one number as its answer. The assistant first works it out "
    "step by step inside <think> </think>, and then gives the number, with nothing else, inside "
    "<answer> </answer>."
)
_HELD_OUT_SHARE = 0.05  # of a single file

_DIGITS = r"(?:[0-9]{1,3}(?:(?:,|\{,\}|\\[,!])[0-9]{3})+|[0-9]+)"  # 1,000 and LaTeX's 1{,}000, 1\,000, 1\!000
_WORD = r"[A-Za-z°][A-Za-z°.'’/-]*"
_PLAIN_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?:\\?\$|[£€])?\s*(?P<inner_sign>[-+]?)
    (?:
        (?:(?P<whole>{_DIGITS})\s+)?(?P<top>{_DIGITS})\s*/\s*(?P<bottom>{_DIGITS})   # 36/2, 17 1/2
        | (?P<decimal>{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)
    )
    \s*(?:\\?%|\\?\$|[£€¢])?\$?
    (?P<unit>\s*/?\s*{_WORD}(?:\s+{_WORD}){{0,5}})?\s*\.?""",
    re.VERBOSE,
)
# Words that make another number of the one before them: `18 thousand` is not 18 of some unit.
_NOT_A_UNIT = re.compile(
    r"\b(?:M|(?i:hundreds?|thousands?|[mbtr]+illions?|k|bn|mn|b|dozens?|score|hal(?:f|ves)|thirds?|quarters?"
    r"|(?:four|fif|six|seven|eigh|nin|ten|twentie|hundred|thousand|million)ths?"
    r"|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty|seventy"
    r"|eighty|ninety|[a-z]+teen|plus|minus|times|divided|multiplied|over|squared|cubed|mod|power"
    r"|and|or|to|not|no|but|[xyznei]|pi))\b"
)


def gsm8k(path: str | None = None, name: str = "openai/gsm8k", config: str = "main") -> Task:
    """The GSM8K task: from `path` if given, otherwise from the dataset `name` on the Hugging Face Hub.

    `path` is a folder with `train.jsonl` and `test.jsonl`, or one JSON-lines file: then its last twentieth,
    at least one row, is held out. There is no shuffling, so all ranks see one split. A training row whose
    prompt is also held out is left out, with a warning.

    Raises FileNotFoundError, ValueError (naming file and line) or ConnectionError when the data is
    not available, ImportError without math_verify.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(f"math_verify, which compares answers, is not installed: {INSTALL}")
    if path is None:
        train, held_out = _hub_rows(name, config)
    elif (place := Path(path).expanduser()).is_dir():
        train, held_out = _file_rows(place / "train.jsonl"), _file_rows(place / "test.jsonl")
    else:
        rows = _file_rows(place)
        if len(rows) < 2:
            raise ValueError(f"{place} has one row: training and evaluation need one each.")
        cut = len(rows) - max(1, round(_HELD_OUT_SHARE * len(rows)))
        train, held_out = rows[:cut], rows[cut:]
    held_out_prompts = {row["prompt"] for row in held_out}
    unseen = [row for row in train if row["prompt"] not in held_out_prompts]
    if not unseen:
        raise ValueError("No training row is left: every prompt of the training rows is also held out.")
    if len(unseen) < len(train):
        logger.warning("%d training rows are left out: their prompts are held out.", len(train) - len(unseen))
    return Task(Dataset.from_list(unseen), Dataset.from_list(held_out), gsm8k_reward, _vote, (0.0, 1.0))


def gsm8k_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    r"""1.0 for each completion whose last complete `<answer>…</answer>` is the row's number, otherwise 0.0.

    Example: `gsm8k_reward(["… </think> <answer>\$1,000.00</answer>"], answer=["1000"])` is `[1.0]`.
    """
    rewards = [0.0] * len(completions)
    open_rows, pairs = [], []
    for row, (completion, right) in enumerate(zip(completions, answer, strict=True)):
        number = parse_number(right)
        if number is None:
            raise ValueError(f"The column `answer` must hold numbers, not {right!r}: use the datasets of gsm8k().")
        given = given_answer(completion)
        if given is None:
            continue
        if (value := parse_number(given)) is not None:
            rewards[row] = float(value == number)
        else:
            open_rows.append(row)
            pairs.append((given, number))
    for row, equal in zip(open_rows, are_equal(pairs), strict=True):
        rewards[row] = float(equal)
    return rewards


def given_answer(completion: str) -> str | None:
    """What the last complete `<answer>…</answer>` holds, without space around it; None if there is none."""
    start = completion.rfind("<answer>", 0, max(0, completion.rfind("</answer>")))
    if start == -1:
        return None
    start += len("<answer>")
    return completion[start : completion.index("</answer>", start)].strip()


def _vote(completion: str) -> str | None:
    """What the reward reads from a completion: a plain number in one spelling (18 for $18.00), other text as it is."""
    given = given_answer(completion)
    number = None if given is None else parse_number(given)
    return given if number is None else str(number)


def parse_number(text: str) -> Fraction | None:
    """The exact value of a plain number, None for any other text.

    Plain: an integer, a decimal, a fraction or a mixed number in ASCII digits, with or without a sign,
    thousands separators, a currency or percent sign (both ignored), bold marks, a unit of up to six words, a
    full stop.

    Examples: `"-$1,000.50"` is -2001/2, `"36/2"` and `"18 eggs per day."` are 18, `"18 or 20"` is None.
    """
    if len(text) > MAX_CHARS:
        return None
    text = " ".join(text.removeprefix("**").removesuffix("**").replace("\N{MINUS SIGN}", "-").split())
    if len(text) > 2 and text[0] == text[-1] == "$":  # a formula in dollars, $18$
        text = text[1:-1].strip()
    match = _PLAIN_NUMBER.fullmatch(text)
    if match is None or (match["sign"] and match["inner_sign"]) or _NOT_A_UNIT.search(match["unit"] or ""):
        return None
    if match["decimal"] is not None:
        value = Fraction(_without_separators(match["decimal"]))
    elif int(_without_separators(match["bottom"])) == 0:
        return None
    else:
        value = Fraction(*(int(_without_separators(match[part])) for part in ("top", "bottom")))
        value += int(_without_separators(match["whole"] or "0"))
    return -value if "-" in (match["sign"], match["inner_sign"]) else value


def _without_separators(digits: str) -> str:
    return re.sub(r"[^0-9.]", "", digits).removesuffix(".")


def _hub_rows(name: str, config: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    try:
        splits = load_dataset(name, config)
    except OSError as error:  # offline, no such dataset, no access: all are OSErrors
        raise ConnectionError(
            f"The dataset {name} ({config}) could not be loaded: {error}. Without a network, or with data of "
            "your own, give data.path=FILE.jsonl, lines of {'question': …, 'answer': '… #### 18'}."
        ) from error
    train, held_out = (
        [_row(record, f"{name}, {split}, row {index}") for index, record in enumerate(splits[split])]
        for split in ("train", "test")
    )
    return train, held_out


def _file_rows(file: Path) -> list[dict[str, str]]:
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist. Give data.path=FILE.jsonl, or a folder with train.jsonl and test.jsonl."
        )
    rows = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():  # an empty last line is common
                continue
            where = f"{file}, line {number}"
            try:
                rows.append(_row(json.loads(line), where))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{where} is not JSON ({error}); write one object on each line.") from error
    if not rows:
        raise ValueError(f"{file} has no rows: give data.path=FILE.jsonl with a question and its answer on each line.")
    return rows


def _row(record: Any, where: str) -> dict[str, str]:
    fields = record if isinstance(record, dict) else {}
    missing = [field for field in ("question", "answer") if not isinstance(fields.get(field), str)]
    if missing:
        raise ValueError(f"{where} has no text `{missing[0]}`; write {{'question': …, 'answer': '… #### 18'}}.")
    _, mark, number = record["answer"].rpartition("####")
    if not mark or parse_number(number) is None:
        raise ValueError(f"{where}: `answer` must end with #### and a number, such as '#### 18'.")
    prompt = f"{_INSTRUCTION}\n\nUser: {record['question'].strip()}\nAssistant: <think>"
    return {"prompt": prompt, "answer": number.strip()}

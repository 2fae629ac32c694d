"""The GSM8K task: which answers count, what hostile answers cost, and the errors for wrong data files."""

import builtins
import json
import time
from fractions import Fraction
from pathlib import Path

import datasets
import pytest

from rl_training.errors import UserError
from rl_training.tasks import gsm8k as gsm8k_module
from rl_training.tasks.answers import last_answer
from rl_training.tasks.gsm8k import given_answer, gsm8k, gsm8k_reward, parse_number

ROWS = [
    {"question": "Ann's 4 hens lay 5 eggs. She eats 2. How many are left?", "answer": "4 * 5 = 20\n#### 18"},
    {"question": "A van costs $1,000 and {tax} of 8%. What is the price?", "answer": "1000*1.08\n#### 1,080"},
    {"question": "It is 2 degrees and falls by 5. What is it now?", "answer": "2 - 5 = <<2-5=-3>>-3\n#### -3"},
    {"question": "Half a dozen pears are shared by 4. How many each?", "answer": "6 / 4\n#### 1.5"},
]
# Answers in the tables are separated by ` | `.
PLAIN = {
    "18": "18 | 18. | 18.0 | $18 | $18.00 | $18.00. | 18% | 018",
    "1000": "1,000 | 1000 | $1,000.00 | 1,000%",
    "1,234,567.5": "1234567.5 | $1,234,567.50",
    "-3": "-3 | -$3 | -3.0",
    "0.5": ".5 | 0.50",
    "9" * 150: "9" * 150,
}
OTHER = {
    "another number": " | 19 | -18 | 18.0000000000000000000000000001 | 1.8 | 1,8 | 1,8.0 | 18,00 | nan | inf | 1e1",
    "a unit or a word": "18 dollars | 18 cents | 18 eggs | 18k | 18 thousand | 18 G | 18 of 20 | about 18 | not 18",
    "an equation": "half = 18 | Not = 18 | x = 18 | 18 = 18 | =18",
    "arithmetic": "36/2 | 20 - 2 | 2*9 | 9+9 | --18 | - 18 | +18",
    "several numbers": "18 or 20 | 17, 18 | 18; 17 | 17-18 | 1 8 | 18 18",
    "LaTeX": r"\boxed{18} | \frac{36}{2} | $18$ | \$18 | **18**",
    "signs in another place": "$-18 | 18$ | %18 | $$18 | 18%% | 18.. | $ | % | .",
    "other digits": "\N{ARABIC-INDIC DIGIT ONE}\N{ARABIC-INDIC DIGIT EIGHT} | 18\N{SUPERSCRIPT TWO}"
    " | \N{FULLWIDTH DIGIT ONE}\N{FULLWIDTH DIGIT EIGHT} | \x00 | \ud800 | " + "0" * 500 + "18",
}
ENDLESS = [
    "9^{9^{9^9}}",
    r"\frac{1}{" * 20 + "2" + "}" * 20,
    "(" * 95 + "1" + ")" * 95,
    r"\operatorname{ones}(99999,99999)",
]
CODE = [
    "__import__('os').system('touch FILE')",
    "1 + __import__('os').system('touch FILE')",
    r"\text{__import__('os').system('touch FILE')} + 1",
    r"\mathrm{exec}(open('FILE','w')) + 1",
    r"\operatorname{eval}(\text{open('FILE','w')})",
    "x_{__import__('os').system('touch FILE')} + 1",
    "[open('FILE','w') for i in (1,)]",
]


def reward(text: str, right: str = "18") -> float:
    """Return the reward of one answer, called as TRL does."""
    completions = [f"So it is that. </think> <answer>{text}</answer>"]
    (value,) = gsm8k_reward(
        prompts=["How many eggs are left?"],
        completions=completions,
        completion_ids=[[1]],
        answer=[right],
    )
    return value


# What counts as the answer.


@pytest.mark.parametrize("right", PLAIN)
def test_a_plain_number_is_accepted(right: str) -> None:
    assert [text for text in PLAIN[right].split(" | ") if reward(text, right) != 1.0] == []


@pytest.mark.parametrize("kind", OTHER)
def test_anything_but_the_number_scores_zero(kind: str) -> None:
    assert [text for text in OTHER[kind].split(" | ") if reward(text) != 0.0] == []


def test_responses_that_give_the_same_number_vote_together() -> None:
    votes = [given_answer(f"<answer>{text}</answer>") for text in ("18", "$18.00", "18.", "17 or 18")]
    assert votes == ["18"] * 3 + ["17 or 18"]


@pytest.mark.parametrize(
    ("completion", "given"),
    [
        ("<answer>17</answer> no, <answer> 18\n</answer>", "18"),
        ("<answer>18</answer> or <answer>20", "18"),
        ("<answer>18</answer> and so on </answer>", "18"),
        ("<answer><answer>18</answer>", "18"),
        ("<answer>1</answer><answer></answer>", ""),
        ("<answer>18", None),
        ("</answer>18<answer>", None),
        ("18", None),
    ],
)
def test_the_last_complete_tag_is_the_answer(completion: str, given: str | None) -> None:
    assert last_answer(completion) == given
    assert gsm8k_reward([completion], answer=["18"]) == [float(given == "18")]


def test_numbers_are_compared_exactly_where_floats_would_agree() -> None:
    assert reward("9007199254740993", "9007199254740992") == 0.0
    assert reward("0.1", "0.1000000000000000055511151231257827") == 0.0
    assert parse_number("$0.10") == Fraction(1, 10)


def test_each_row_has_its_own_answer_in_one_call() -> None:
    completions = [f"<answer>{text}</answer>" for text in ("$18.00", "18", "$18.00", "2.")]
    assert gsm8k_reward(completions, answer=["18", "2", "2", "2"]) == [1.0, 0.0, 0.0, 1.0]
    with pytest.raises(ValueError, match=r"`answer` .*'some #### 18'"):
        reward("18", right="some #### 18")


# What a hostile answer costs, and that it runs nothing.


def test_a_hostile_answer_scores_zero_at_once_without_running_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: object) -> None:
        raise AssertionError(f"run as code: {args}")

    for name in ("eval", "exec"):
        monkeypatch.setattr(builtins, name, run)
    texts = [code.replace("FILE", str(tmp_path / "f")) for code in CODE] + ENDLESS
    texts += ["(" * 100_000, "1+" * 200 + "1", "9" * 10_000, "9 " * 100, "{" * 199, "a " * 99, "-" * 199 + "1"]
    for text in texts:
        started = time.process_time()
        assert reward(text) == 0.0, text
        assert time.process_time() - started < 0.2, text
    assert list(tmp_path.iterdir()) == []


# The data.


def _write(file: Path, rows: list[dict[str, str]]) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def test_one_file_gives_both_splits_with_its_end_held_out(tmp_path: Path) -> None:
    many = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(100)]
    task = gsm8k(str(_write(tmp_path / "rows.jsonl", many)))
    assert list(task.train_dataset["answer"]) == [str(n) for n in range(95)]
    assert list(task.eval_dataset["answer"]) == [str(n) for n in range(95, 100)]
    assert list(gsm8k(str(_write(tmp_path / "few.jsonl", ROWS))).eval_dataset["answer"]) == ["1.5"]


def test_a_folder_gives_its_own_splits_and_every_right_answer_is_rewarded(tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", ROWS[:3])
    _write(tmp_path / "test.jsonl", ROWS[3:])
    task = gsm8k(str(tmp_path))
    assert task.train_dataset.column_names == task.eval_dataset.column_names == ["prompt", "answer"]
    for rows, answers in ((task.train_dataset, ["18", "1,080", "-3"]), (task.eval_dataset, ["1.5"])):
        completions = [f" </think> <answer>{answer}</answer>" for answer in answers]
        assert task.reward(completions, **rows.to_dict()) == [1.0] * len(rows)
    assert task.reward.__name__ == "gsm8k_reward"


def test_the_prompt_has_the_question_verbatim_and_an_opening_think_tag(tmp_path: Path) -> None:
    prompts = gsm8k(str(_write(tmp_path / "rows.jsonl", ROWS))).train_dataset["prompt"]
    assert all(prompt.endswith("\nAssistant: <think>") for prompt in prompts)
    assert "User: A van costs $1,000 and {tax} of 8%. What is the price?\n" in prompts[1]


def test_a_held_out_prompt_is_not_in_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = gsm8k(str(_write(tmp_path / "rows.jsonl", [*ROWS, ROWS[0]])))
    assert list(task.train_dataset["answer"]) == ["1,080", "-3", "1.5"]
    assert "1 training rows are left out" in caplog.text
    with pytest.raises(ValueError, match=r"same\.jsonl "):
        gsm8k(str(_write(tmp_path / "same.jsonl", [ROWS[0], ROWS[0]])))


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        (b'{"question": "?", "answer": "#### 1"', r"rows\.jsonl, line 3 is not JSON"),
        (b"\xff\xfe", r"line 3 is not JSON"),
        (b'["?", "#### 1"]', r"line 3 has no text `question`"),
        (b'{"question": "?"}', r"line 3 has no text `answer`"),
        (b'{"question": "?", "answer": 18}', r"line 3 has no text `answer`"),
        (b'{"question": "?", "answer": "18"}', r"line 3: `answer` must end with ####"),
        (b'{"question": "?", "answer": "#### many"}', r"line 3: `answer` must end with ####"),
    ],
)
def test_a_malformed_line_is_named_with_its_number(tmp_path: Path, line: bytes, mistake: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(json.dumps(ROWS[0]).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(ValueError, match=mistake):
        gsm8k(str(file))


def test_a_missing_or_empty_file_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.path=FILE\.jsonl"):
        gsm8k(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match=rf"{tmp_path}.train\.jsonl"):
        gsm8k(str(tmp_path))
    with pytest.raises(ValueError, match=r"rows\.jsonl .*data\.path=FILE\.jsonl"):
        gsm8k(str(_write(tmp_path / "rows.jsonl", [])))
    with pytest.raises(ValueError, match=r"rows\.jsonl .*\bone\b"):
        gsm8k(str(_write(tmp_path / "rows.jsonl", ROWS[:1])))


def test_without_a_path_the_hub_is_tried_and_its_failure_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def hub(name: str, config: str) -> datasets.DatasetDict:
        if name == "me/one_split":
            return datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
        if (name, config) != ("openai/gsm8k", "main"):
            raise ConnectionError(f"Couldn't reach {name!r} on the Hub")
        train, test = (datasets.Dataset.from_list(rows) for rows in (ROWS[:2], ROWS[2:]))
        return datasets.DatasetDict({"train": train, "test": test})

    monkeypatch.setattr(gsm8k_module, "load_dataset", hub)
    assert list(gsm8k().train_dataset["answer"]) == ["18", "1,080"]
    assert list(gsm8k().eval_dataset["answer"]) == ["-3", "1.5"]
    with pytest.raises(UserError, match=r"me/mine.*Couldn't reach.*data\.path=FILE\.jsonl"):
        gsm8k(name="me/mine")
    with pytest.raises(UserError, match=r"me/one_split .*no split test, only train: .*data\.path=FILE\.jsonl"):
        gsm8k(name="me/one_split")

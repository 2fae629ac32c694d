"""The GSM8K task: which answers count, what hostile answers cost, and the errors for wrong data files."""

import builtins
import json
import random
import time
from fractions import Fraction
from pathlib import Path

import datasets
import pytest

from rl_training.errors import UserError
from rl_training.tasks import gsm8k as gsm8k_module
from rl_training.tasks.gsm8k import given_answer, gsm8k, gsm8k_reward
from rl_training.tasks.stated_number import parse_number

ROWS = [
    {"question": "Ann's 4 hens lay 5 eggs. She eats 2. How many are left?", "answer": "4 * 5 = 20\n#### 18"},
    {"question": "A van costs $1,000 and {tax} of 8%. What is the price?", "answer": "1000*1.08\n#### 1,080"},
    {"question": "It is 2 degrees and falls by 5. What is it now?", "answer": "2 - 5 = <<2-5=-3>>-3\n#### -3"},
    {"question": "Half a dozen pears are shared by 4. How many each?", "answer": "6 / 4\n#### 1.5"},
]
# Answers in the tables are separated by ` | `.
PLAIN = {
    "18": r"18 | 18. | 18.0 | $18.00 | \$18 | $18$ | **18** | 18 dollars | 18 eggs per day. | 18 months"
    r" | $18/day | 18 egg | 18 Eggs | 18 eggs left | 18 square feet | 18 mph | 18 °C | 18 per day | 18 each | 18 USD"
    r" | 18 years old | 18% | 18\% | 36/2 | 17 2/2 | +18",
    "1000": r"1,000 | $1{,}000$ | 1\,000 | 1000 | $1,000.00",
    "1,234,567.5": "1234567.5 | $1,234,567.50",
    "-3": "-3 | \N{MINUS SIGN}3 | -$3 | $-3 | -6/2",
    "0.5": ".5 | 1/2 | 0.50",
    "9" * 150: "9" * 150,
}
EQUAL = {
    "a formula and its marks": r"\frac{36}{2} | $\frac{36}{2}$ | \boxed{18} | \boxed{\frac{36}{2}} | \(18\) | \[ 18 \]",
    "a unit": r"18\text{ dollars} | 18\mathrm{km} | 20 - 2 eggs | $20 - $2 | \$20 - \$2 | 6 + 12 \text{ eggs}",
    "arithmetic": r"20 - 2 | 2*9 | 2 \times 9 | 36 \div 2 | \sqrt{324} | 17\frac{2}{2} | \dfrac{36}{2} | \frac{36}{1+1}"
    r" | 2(3+6) | 2^{4} + 2 | 3^2 \cdot 2 | \left(18\right) | 18,000/1000 | --18",
    "a lone symbol": r"x = 18 | x=18 | x_1 = 18 | x = \frac{36}{2} | $x = 18$ | \boxed{x = 18} | Total = 18 | x = $18"
    r" | \text{Total} = 18 | x = 9 + 9 = 18",
    "equal sides": r"2+16 = 18 | 18 = 18 | 18 = 20 - 2 | 9 + 9 = 18 = 20 - 2 | 6 + 6 + 6 = 18 \text{ eggs}",
}
UNEQUAL = {
    "another number": r" | 19 | -18 | 18.0000000000000000000000000001 | 1.8 | 1,8 | 1/0 | \frac{18}{0} | eighteen | nan"
    r" | \infty | \sqrt{325} | 2^{0.5} | \frac{180000001}{10000000} | 18 + 10^{-20}",
    "words that change the number": r"18 thousand | 18 dozen | 18k | 18M | 18x | 18 hundredths | 18 minus five"
    r" | 18\text{ million} | 18\text{k} | 18\text{ hundred} | 18\text{ (not 17)} | \text{not }18 | \text{not } x = 18"
    r" | 18 \text{ dollars and 50 cents} | She makes 18 dollars | 18 grand | 18 lakh | 18 crores | 18 gross"
    r" | 18 quadrillion | 18 degrees below zero | 18 negative | 18 isn't right | 18 never | 18 nor 17 | not = 18"
    " | 18 G | 18 short | 18 short of | 18 short eggs | 18 nope | 18 XVII | 18 eggs of | 18 off | 18 of 20 | 18 apples"
    " | 18 R | 18 bits | 18 half eggs | 18 less | 18 in vain | 18 how much | 18 P | 20 - 2 nope | x = 18 nope",
    "an equation that does not hold": r"1 = 18 | 2+2 = 18 | x = 17 = 18 | x = 18 = 17 | 17 = 18 = 18 | 18/17 = 18",
    "an equation of something else": r"x^{99}+x^{98} = 18 | 18 = x | x = y = 18 | x = | = 18 | x+1 = 18"
    r" | 2x = 18 | 0x = 18 | xy = 18 | f(x) = 18 | \pi = 18 | \infty = 18 | x == 18",
    "several numbers": r"18 or 20 | 17 or 18 | 17\text{ or }18 | x = 17 \text{ or } x = 18 | 18, 20 | 17, 18 | 18; 17"
    r" | x = 18, y = 17 | x = 17,18 | 17 \pm 1 | 18 \pm 0 | \boxed{17}\boxed{18} | \boxed{17}, \boxed{18} | $17$ $18$",
    "a range or a set": r"17-18 | 17 \ldots 18 | [18, 18] | (17, 18] | \{18\} | \{17, 18\} | x \in \{18\}"
    r" | x \in [17, 18]",
    "another relation": r"x > 17 | x \le 18 | x \neq 18 | x \approx 18 | 17 \equiv 18 | 17 \to 18",
    "more than the number": r"17\boxed{18} | \boxed{18}17 | -\boxed{18} | 18!/17! | \max(1, 18) | 18 \frac{km}{h}",
    "digits beside one another": r"17 1 | 9 (9) | (9)(9) | 8\,10 | 18_000 | 17\) \(1 | 17$ $1 | $17$ $1$ | 17{1}"
    r" | {17}{1} | 2{9} | 1\!8 | 1\text{}8 | 17\text{ and }1 | 17 \quad 1 | 17~1 | 2^10 - 1006",
    "an unknown that cancels": r"x + 18 - x | 18 x/x | 18 + 0 \cdot x | x = 18 - y + y",
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
        prompts=["How many eggs are left, short of half? How much is it?"],
        completions=completions,
        completion_ids=[[1]],
        answer=[right],
    )
    return value


# What counts as the answer.


@pytest.mark.parametrize("right", PLAIN)
def test_a_plain_number_is_accepted(right: str) -> None:
    assert [text for text in PLAIN[right].split(" | ") if reward(text, right) != 1.0] == []


@pytest.mark.parametrize("kind", EQUAL)
def test_an_equal_expression_is_accepted(kind: str) -> None:
    texts = EQUAL[kind].split(" | ")
    assert [text for text in texts if reward(text) != 1.0] == []
    assert [text for text in texts if reward(text, "19") != 0.0] == []


@pytest.mark.parametrize("kind", UNEQUAL)
def test_a_text_that_does_not_state_the_number_scores_zero(kind: str) -> None:
    assert [text for text in UNEQUAL[kind].split(" | ") if reward(text) != 0.0] == []


def test_a_word_of_the_question_is_a_unit_in_its_own_row_only() -> None:
    said = ["<answer>18 pears</answer>", "<answer>18 more pears</answer>"]
    asked = [
        "How many more pears are there than figs?",
        "How many pears are there, 2 more than figs?",
        "How many figs?",
    ]
    paid = [gsm8k_reward(said, answer=["18"] * 2, prompts=[question] * 2) for question in asked]
    assert paid == [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    around = gsm8k_module._row({"question": "How many figs?", "answer": "#### 18"}, "")["prompt"]
    said = [f"<answer>18 {word}</answer>" for word in ("figs", "answers", "think", "tags")]
    assert gsm8k_reward(said, answer=["18"] * 4, prompts=[around] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_arithmetic_is_exact_and_follows_the_usual_precedence() -> None:
    """Compared with Python's arithmetic on fractions, on random expressions in both notations."""
    rng = random.Random(0)
    for _ in range(300):
        a, b, c, d = (rng.randint(1, 9) for _ in range(4))
        value = Fraction(a, b) - c * (d + a) ** 2
        latex = rf"\frac{{{a}}}{{{b}}} - {c}({d}+{a})^{{2}}"
        assert reward(latex, str(value)) == 1.0, latex
        assert reward(f"{a}/{b} - {c}*({d}+{a})**2", str(value)) == 1.0
        assert reward(latex, str(value + 1)) == 0.0


def test_responses_that_state_the_same_number_vote_together() -> None:
    texts = ("18", "$18.00", r"\boxed{18}", "x = 18", "20 - 2", "17 or 18")
    votes = [gsm8k_module._vote(f"<answer>{text}</answer>") for text in texts]
    assert votes == ["18"] * 5 + ["17 or 18"]


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
    assert given_answer(completion) == given
    assert gsm8k_reward([completion], answer=["18"]) == [float(given == "18")]


def test_numbers_are_compared_exactly_where_floats_would_agree() -> None:
    assert reward("9007199254740993", "9007199254740992") == 0.0
    assert reward("0.1", "0.1000000000000000055511151231257827") == 0.0
    assert parse_number("$0.10") == Fraction(1, 10)


def test_each_row_has_its_own_answer_in_one_call() -> None:
    completions = [f"<answer>{text}</answer>" for text in (r"\frac{36}{2}", "18", r"\frac{36}{2}", "x = 2")]
    assert gsm8k_reward(completions, answer=["18", "2", "2", "2"]) == [1.0, 0.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="must hold numbers"):
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
    with pytest.raises(ValueError, match="No training row is left"):
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
    with pytest.raises(UserError, match=r"train\.jsonl does not exist"):
        gsm8k(str(tmp_path))
    with pytest.raises(ValueError, match="has no rows"):
        gsm8k(str(_write(tmp_path / "rows.jsonl", [])))
    with pytest.raises(ValueError, match="one row"):
        gsm8k(str(_write(tmp_path / "rows.jsonl", ROWS[:1])))


def test_without_a_path_the_hub_is_tried_and_its_failure_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def hub(name: str, config: str) -> datasets.DatasetDict:
        if (name, config) != ("openai/gsm8k", "main"):
            raise ConnectionError(f"Couldn't reach {name!r} on the Hub")
        train, test = (datasets.Dataset.from_list(rows) for rows in (ROWS[:2], ROWS[2:]))
        return datasets.DatasetDict({"train": train, "test": test})

    monkeypatch.setattr(gsm8k_module, "load_dataset", hub)
    assert list(gsm8k().train_dataset["answer"]) == ["18", "1,080"]
    assert list(gsm8k().eval_dataset["answer"]) == ["-3", "1.5"]
    with pytest.raises(UserError, match=r"me/mine.*Couldn't reach.*data\.path=FILE\.jsonl"):
        gsm8k(name="me/mine")

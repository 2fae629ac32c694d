"""The GSM8K task: which answers count, what hostile answers cost, and what a wrong data file is told.

The checks of the process that runs math_verify are made on the real process; nothing of it is mocked.
"""

import json
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import datasets
import pytest

from rl_training.tasks import gsm8k as gsm8k_module
from rl_training.tasks import math_check
from rl_training.tasks.gsm8k import given_answer, gsm8k, gsm8k_reward, parse_number

NUMBER = Fraction(18)
ROWS = [
    {"question": "Ann's 4 hens lay 5 eggs. She eats 2. How many are left?", "answer": "4 * 5 = 20\n#### 18"},
    {"question": "A van costs $1,000 and {tax} of 8%. What is the price?", "answer": "1000*1.08\n#### 1,080"},
    {"question": "It is 2 degrees and falls by 5. What is it now?", "answer": "2 - 5 = <<2-5=-3>>-3\n#### -3"},
    {"question": "Half a dozen pears are shared by 4. How many each?", "answer": "6 / 4\n#### 1.5"},
]
# Answers in the tables are separated by ` | `.
PLAIN = {
    "18": r"18 | 18. | 18.0 | $18.00 | \$18 | $18$ | **18** | 18 dollars | 18 eggs per day. | 18 months"
    r" | $18/day | 18% | 18\% | 36/2 | 17 2/2 | +18",
    "1000": r"1,000 | $1{,}000$ | 1\,000 | 1000 | $1,000.00",
    "1,234,567.5": "1234567.5 | $1,234,567.50",
    "-3": "-3 | \N{MINUS SIGN}3 | -$3 | $-3 | -6/2",
    "0.5": ".5 | 1/2 | 0.50",
    "9" * 150: "9" * 150,
}
EQUAL = (
    r"\frac{36}{2} | $\frac{36}{2}$ | \boxed{18} | \(18\) | 18\text{ dollars} | x = 18 | 20 - 2 | 2 \times 9"
    r" | \sqrt{324} | 17\frac{2}{2} | 2(3+6)"
)
# The grammar by itself would take `17 1`, `9 (9)`, `(9)(9)`, `8\,10` and `18_000` for 18.
UNEQUAL = (
    r" | 19 | -18 | 18.0000000000000000000000000001 | 1.8 | 1,8 | 1/0 | \frac{18}{0} | 18 thousand | 18 dozen"
    r" | 18k | 18M | 18x | 18 hundredths | 18 or 20 | 18, 20 | 18 minus five | eighteen | nan | \infty"
    r" | 17 1 | 9 (9) | (9)(9) | 8\,10 | 18_000 | She makes 18 dollars"
    " | \N{ARABIC-INDIC DIGIT ONE}\N{ARABIC-INDIC DIGIT EIGHT} | 18\N{SUPERSCRIPT TWO}"
    " | \N{FULLWIDTH DIGIT ONE}\N{FULLWIDTH DIGIT EIGHT} | \x00 | \ud800 | " + "0" * 500 + "18"
)
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
    """The reward of one answer, asked for as TRL does."""
    completions = [f"So it is that. </think> <answer>{text}</answer>"]
    (value,) = gsm8k_reward(prompts=["p"], completions=completions, completion_ids=[[1]], answer=[right])
    return value


def check(text: str, seconds: float = 2.0) -> bool:
    """What one check says, with the sieve before it and the worker behind it."""
    (equal,) = math_check.are_equal([(text, NUMBER)], deadline_seconds=seconds)
    return equal


@pytest.fixture
def no_worker() -> None:
    """Ends the process that an earlier test has left, so that a new one can be told."""
    math_check._worker.close()


# What counts as the answer.


@pytest.mark.parametrize("right", PLAIN)
def test_a_plain_number_counts_and_starts_no_process(no_worker: None, right: str) -> None:
    assert [text for text in PLAIN[right].split(" | ") if reward(text, right) != 1.0] == []
    assert math_check._worker.pid is None


@pytest.mark.parametrize("text", EQUAL.split(" | "))
def test_an_equal_expression_counts(text: str) -> None:
    assert parse_number(text) is None
    assert reward(text) == 1.0


@pytest.mark.parametrize("text", UNEQUAL.split(" | "))
def test_anything_else_scores_zero(text: str) -> None:
    assert reward(text) == 0.0


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


# What a hostile answer costs, and what it may run.


@pytest.mark.parametrize("text", ENDLESS)
def test_an_endless_expression_is_stopped_and_the_next_check_is_right(text: str) -> None:
    math_check._worker.start()
    started = time.monotonic()
    assert not check(text, seconds=0.1)
    assert time.monotonic() - started < 10.0
    assert check(r"\frac{36}{2}")


def test_a_long_answer_never_reaches_the_process(no_worker: None) -> None:
    assert [reward(text) for text in ("(" * 100_000, "1+" * 200 + "1", "9" * 10_000)] == [0.0] * 3
    assert math_check._worker.pid is None


def test_a_hostile_batch_ends_within_the_budget_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    pairs = [(f"9^{{9^{{9^{{{n}}}}}}}", NUMBER) for n in range(9, 49)] * 2 + [("x = 18", NUMBER)]
    math_check._worker.start()
    started = time.monotonic()
    assert not any(math_check.are_equal(pairs, deadline_seconds=0.2, budget_seconds=0.2))
    assert time.monotonic() - started < 10.0  # 16 s of deadlines without the budget
    assert [record.getMessage()[:16] for record in caplog.records] == ["81 of 81 answers"]


def test_equal_answers_are_checked_once_by_a_process_that_is_kept() -> None:
    assert check("x = 18")
    pid = math_check._worker.pid
    assert math_check.are_equal([("x = 17", NUMBER)] + [("x = 18", NUMBER)] * 9) == [False] + [True] * 9
    assert math_check._worker.pid == pid
    started = time.monotonic()
    assert not any(math_check.are_equal([(ENDLESS[0], NUMBER)] * 50, deadline_seconds=0.1))
    assert time.monotonic() - started < 10.0


@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit and /proc are Linux's")
def test_the_memory_of_the_process_is_limited() -> None:
    math_check._worker.start()
    limits = Path(f"/proc/{math_check._worker.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert line.split()[3] == str(math_check._MAX_WORKER_BYTES)


def test_python_code_as_an_answer_does_nothing(tmp_path: Path) -> None:
    for code in CODE:
        text = code.replace("FILE", str(tmp_path / "f"))
        assert reward(text) == 0.0
        assert not math_check._worker.check(text, NUMBER, 2.0)  # past the sieve for what cannot be a number
    assert list(tmp_path.iterdir()) == []


# Loads the module by its file: importing the package would import torch.
LOAD = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("math_check", {math_check.__file__!r})
math_check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(math_check)
from fractions import Fraction
"""
WATCH_EVAL = """
import builtins, json
evaluated = []
for name in ("eval", "exec"):
    def spy(source, *args, _real=getattr(builtins, name), **kwargs):
        value = _real(source, *args, **kwargs)
        if isinstance(source, str):
            evaluated.append(source)
        return value
    setattr(builtins, name, spy)

import latex2sympy2_extended, sympy
latex2sympy2_extended.latex2sympy("7")
assert any("7" in source for source in evaluated), "the spy must see the unguarded grammar evaluate"

check = math_check.load_check()
del evaluated[:]
equal = 0
for text in json.load(sys.stdin):
    try:
        equal += check(text, "18")
    except Exception:
        pass
assert equal == 5 and evaluated == [], (equal, evaluated)

x = sympy.Symbol("x")
for run in (lambda: eval("1 + 1"), lambda: exec("y = 1"), lambda: sympy.sympify("x + 1"),
            lambda: sympy.parse_expr("1 + 1"), lambda: sympy.lambdify(x, x)):
    try:
        run()
    except (RuntimeError, sympy.SympifyError):
        continue
    raise AssertionError("code made from text has run")
assert not {"torch", "trl", "transformers", "numpy"} & set(sys.modules)
"""


def test_no_answer_reaches_eval_or_exec_and_the_guard_refuses_both() -> None:
    texts = [r"\frac{36}{2}", "18.0", "1.8E1", "x = 18", r"18 + 0.00 \times 1000", *CODE, "x + y + z"]
    script = [sys.executable, "-c", LOAD + WATCH_EVAL]
    subprocess.run(script, input=json.dumps(texts), text=True, check=True, timeout=20)


# The life of the process.


def _running(of: str, number: int) -> list[str]:
    """The states of those processes, -p PID or -s SESSION, but not of zombies, whose adoptive parent is slow."""
    states = subprocess.run(["ps", "-o", "stat=", of, str(number)], capture_output=True, text=True, check=False)
    return [state for state in states.stdout.split() if not state.startswith("Z")]


def _is_running(pid: int) -> bool:
    return _running("-p", pid) != []


def test_no_process_is_left_when_the_trainer_exits() -> None:
    script = LOAD + "assert math_check.are_equal([('x=18', Fraction(18))])[0]; print(math_check._worker.pid)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20)
    assert not _is_running(int(done.stdout))
    assert done.stderr == ""


def test_no_process_is_left_when_the_trainer_is_killed_within_a_check() -> None:
    check = "math_check._worker.start(); print(flush=True); math_check._worker.check('9^{9^{9^9}}', Fraction(18), 1)"
    end = time.monotonic() + 20.0
    with subprocess.Popen(
        [sys.executable, "-c", LOAD + check], stdout=subprocess.PIPE, start_new_session=True
    ) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        time.sleep(0.2)  # the check has begun
        assert len(_running("-s", trainer.pid)) == 2
        trainer.kill()
    while _running("-s", trainer.pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_forked_child_starts_its_own_process_and_leaves_the_parents_alone() -> None:
    assert check("x = 18")
    pid = math_check._worker.pid
    child = os.fork()
    if child == 0:
        apart = check("x = 18") and math_check._worker.pid != pid
        math_check._worker.close()
        os._exit(0 if apart else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert check("x = 18")
    assert math_check._worker.pid == pid


def test_a_process_that_died_between_checks_is_started_again() -> None:
    math_check._worker.start()
    pid = math_check._worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while _is_running(pid):
        time.sleep(0.01)
    assert check("x = 18")


def test_the_reply_to_an_interrupted_check_is_not_taken_for_the_next_one() -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    math_check._worker.start()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            math_check._worker.check(ENDLESS[0], NUMBER, 2.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert math_check.are_equal([("x = 18", NUMBER), ("x = 17", NUMBER)]) == [True, False]


def test_math_verify_that_cannot_be_imported_is_an_error_with_the_remedy(
    no_worker: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('no antlr here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"no antlr here.*pip install math-verify"):
        reward("x = 18")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match="pip install math-verify"):
        gsm8k(str(_write(tmp_path / "rows.jsonl", ROWS)))


# The data.


def _write(file: Path, rows: list[dict[str, str]]) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def test_one_file_gives_both_splits_and_its_end_is_held_out(tmp_path: Path) -> None:
    many = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(100)]
    task = gsm8k(str(_write(tmp_path / "rows.jsonl", many)))
    assert list(task.train_dataset["answer"]) == [str(n) for n in range(95)]
    assert list(task.eval_dataset["answer"]) == [str(n) for n in range(95, 100)]
    assert list(gsm8k(str(_write(tmp_path / "few.jsonl", ROWS))).eval_dataset["answer"]) == ["1.5"]


def test_a_folder_gives_its_own_splits_and_every_right_answer_earns_one(tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", ROWS[:3])
    _write(tmp_path / "test.jsonl", ROWS[3:])
    task = gsm8k(str(tmp_path))
    assert task.train_dataset.column_names == task.eval_dataset.column_names == ["prompt", "answer"]
    for rows, answers in ((task.train_dataset, ["18", "1,080", "-3"]), (task.eval_dataset, ["1.5"])):
        completions = [f" </think> <answer>{answer}</answer>" for answer in answers]
        assert task.reward(completions, **rows.to_dict()) == [1.0] * len(rows)
    assert task.reward.__name__ == "gsm8k_reward"


def test_the_prompt_has_the_question_verbatim_and_opens_a_thought(tmp_path: Path) -> None:
    prompts = gsm8k(str(_write(tmp_path / "rows.jsonl", ROWS))).train_dataset["prompt"]
    assert all(prompt.endswith("\nAssistant: <think>") for prompt in prompts)
    assert "User: A van costs $1,000 and {tax} of 8%. What is the price?\n" in prompts[1]


def test_a_held_out_prompt_is_not_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: bytes, mistake: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(json.dumps(ROWS[0]).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(ValueError, match=mistake):
        gsm8k(str(file))


def test_a_missing_or_empty_file_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.path=FILE\.jsonl"):
        gsm8k(str(tmp_path / "none.jsonl"))
    with pytest.raises(FileNotFoundError, match=r"train\.jsonl does not exist"):
        gsm8k(str(tmp_path))
    with pytest.raises(ValueError, match="has no rows"):
        gsm8k(str(_write(tmp_path / "rows.jsonl", [])))
    with pytest.raises(ValueError, match="one row"):
        gsm8k(str(_write(tmp_path / "rows.jsonl", ROWS[:1])))


def test_without_a_path_the_hub_is_asked_and_its_failure_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def hub(name: str, config: str) -> datasets.DatasetDict:
        if (name, config) != ("openai/gsm8k", "main"):
            raise ConnectionError(f"Couldn't reach {name!r} on the Hub")
        train, test = (datasets.Dataset.from_list(rows) for rows in (ROWS[:2], ROWS[2:]))
        return datasets.DatasetDict({"train": train, "test": test})

    monkeypatch.setattr(gsm8k_module, "load_dataset", hub)
    assert list(gsm8k().train_dataset["answer"]) == ["18", "1,080"]
    assert list(gsm8k().eval_dataset["answer"]) == ["-3", "1.5"]
    with pytest.raises(ConnectionError, match=r"me/mine.*Couldn't reach.*data\.path=FILE\.jsonl"):
        gsm8k(name="me/mine")

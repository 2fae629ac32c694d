"""Claims on the arithmetic task: what it asks, what it rewards, and that evaluation prompts stay unseen."""

import re
from itertools import islice

import pytest

from rl_training.errors import UserError
from rl_training.tasks.arithmetic import WorkedExample, arithmetic, arithmetic_reward, worked_examples
from rl_training.tasks.task import Task


@pytest.fixture(scope="module")
def task() -> Task:
    return arithmetic()


@pytest.fixture(scope="module")
def examples() -> list[WorkedExample]:
    return list(islice(worked_examples(seed=3), 1000))


def partial_results(prompt: str) -> list[int]:
    """Return the partial results computed from the text alone: signed digits, added from left to right."""
    assert re.fullmatch(r"\d([+-]\d)*=\?<think>", prompt)
    terms = [int(term) for term in re.findall(r"[+-]?\d", prompt)]
    return [sum(terms[: count + 1]) for count in range(len(terms))]


def test_a_prompt_is_a_chain_of_three_to_seven_digits_whose_partial_results_are_digits(task: Task) -> None:
    for dataset in (task.train_dataset, task.eval_dataset):
        lengths = set()
        for row in dataset:
            results = partial_results(row["prompt"])
            assert all(0 <= result <= 9 for result in results)
            assert row["answer"] == str(results[-1])
            lengths.add(len(results))
        assert lengths == {3, 4, 5, 6, 7}


def test_prompts_are_unique_within_and_across_splits(task: Task) -> None:
    prompts = [*task.train_dataset["prompt"], *task.eval_dataset["prompt"]]
    assert len(prompts) == 4096 + 512
    assert len(set(prompts)) == len(prompts)


def test_held_out_prompts_are_never_in_training_with_any_seed(task: Task, examples: list[WorkedExample]) -> None:
    held_out = set(task.eval_dataset["prompt"])
    assert held_out.isdisjoint(arithmetic(num_train=2000, num_eval=0, seed=1).train_dataset["prompt"])
    assert held_out.isdisjoint(example.prompt for example in examples)


def test_the_datasets_are_determined_by_the_seed(task: Task) -> None:
    again, other = arithmetic(), arithmetic(seed=1)
    for split in ("train_dataset", "eval_dataset"):
        assert getattr(again, split).to_list() == getattr(task, split).to_list()
        assert getattr(other, split).to_list() != getattr(task, split).to_list()


def test_a_worked_example_is_rewarded(examples: list[WorkedExample]) -> None:
    answers = [str(partial_results(example.prompt)[-1]) for example in examples]
    assert arithmetic_reward([example.completion for example in examples], answer=answers) == [1.0] * 1000


def test_worked_examples_have_the_requested_number_of_operands() -> None:
    longer = [partial_results(example.prompt) for example in islice(worked_examples(0, 16, 18), 100)]
    assert {len(results) for results in longer} == {16, 17, 18}


def test_half_of_the_worked_examples_show_the_correct_running_result(examples: list[WorkedExample]) -> None:
    thoughts = [example.completion.split("</think>")[0] for example in examples]
    for example, thought in zip(examples, thoughts, strict=True):
        if thought:
            first, *later = partial_results(example.prompt)
            steps = re.findall(r"[+-]\d", example.prompt)
            pairs = zip(steps, later, strict=True)
            assert thought == f"{first}" + "".join(f"{step}={result}" for step, result in pairs)
    assert 0.45 < sum(map(bool, thoughts)) / len(thoughts) < 0.55


@pytest.mark.parametrize("completion", [
    "", "6", "</think>6", "<answer>6", "6</answer>", "</answer>6<answer>", "<answer></answer>", "<answer> 6</answer>",
    "<answer>6\n</answer>", "<answer>06</answer>", "<answer>6.0</answer>", "<answer>+6</answer>", "<ANSWER>6</ANSWER>",
    "<answer>5+1</answer>", "<answer>7</answer>", "<answer>6</answer><answer>6</answer>", "<answer>6</answer></answer>",
    "<answer>5</answer><answer>6</answer>", "<answer><answer>6</answer></answer>",
    "<answer>\N{FULLWIDTH DIGIT SIX}</answer>", "<answer>__import__('os')</answer>",
])  # fmt: skip
def test_only_the_answer_in_one_pair_of_tags_is_rewarded(completion: str) -> None:
    assert arithmetic_reward([completion], answer=["6"]) == [0.0]


def test_text_outside_the_tags_does_not_matter() -> None:
    completions = ["<answer>6</answer>", "7+2=4</think><answer>6</answer>\n<think>", "\x00<<answer>6</answer>>"]
    assert arithmetic_reward(completions, answer=["6"] * 3, prompts=["7+2-3=?<think>"] * 3) == [1.0] * 3


def test_the_name_of_the_reward_metric_is_fixed(task: Task) -> None:
    assert task.reward.__name__ == "arithmetic_reward"


def test_more_chains_than_there_are_is_refused_with_how_many_were_found() -> None:
    """Of 810 chains of three operands, 106 are held out."""
    assert len(arithmetic(1, 106, max_operands=3).eval_dataset) == 106
    with pytest.raises(ValueError, match=r"\b106\b.* data\.num_eval"):
        arithmetic(1, 107, max_operands=3)


def test_chains_have_the_requested_number_of_operands_and_at_least_three() -> None:
    longer = arithmetic(num_train=100, num_eval=10, min_operands=8, max_operands=9)
    for dataset in (longer.train_dataset, longer.eval_dataset):
        assert {len(partial_results(prompt)) for prompt in dataset["prompt"]} == {8, 9}
    with pytest.raises(UserError, match=r"data\.min_operands=5 and data\.max_operands=4 "):
        arithmetic(min_operands=5, max_operands=4)


@pytest.mark.parametrize(
    ("argument", "value"), [("min_operands", "x"), ("min_operands", 2), ("num_train", "many"), ("num_eval", -1)]
)
def test_arguments_that_are_no_numbers_of_rows_or_operands_are_refused_by_name(argument: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"^data\.{argument}={value!r} must be a whole number"):
        arithmetic(**{argument: value})  # type: ignore[arg-type]

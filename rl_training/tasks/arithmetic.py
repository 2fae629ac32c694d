"""The default task: chains of one-digit additions and subtractions, easy enough for 100k parameters.

Every partial result is a digit: `7+2-3=?<think>` has the partial results 7, 9, 6 and the answer 6. The partial results
are a random walk on 0..9 that moves to one of the nine other digits with equal probability. So there are 10 * 9^(n-1)
chains of n operands, and no operand after the first is 0.

A fixed eighth of all chains, chosen by a checksum of the prompt, is held out: with any seed, neither training nor the
worked examples of the warm start contain a prompt of the evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, pairwise
from typing import Any

from datasets import Dataset

from rl_training.errors import UserError
from rl_training.options import check_whole
from rl_training.tasks.answers import only_answer
from rl_training.tasks.task import Task, WorkedExample, distinct_rows, is_held_out

MIN_OPERANDS = 3
MAX_OPERANDS = 7


Chain = tuple[int, ...]  # the partial results of an exercise: (7, 9, 6) is 7+2-3


def arithmetic(
    num_train: int = 4096,
    num_eval: int = 512,
    seed: int = 0,
    min_operands: int = MIN_OPERANDS,
    max_operands: int = MAX_OPERANDS,
) -> Task:
    """Make the arithmetic task: `num_train` training and `num_eval` held-out chains, without duplicates.

    The number of operands is drawn uniformly, and duplicate chains are drawn again. There are only 810 chains of three
    operands, so these are somewhat rarer than the others. The default model was warmed up on 3 to 7 operands. Longer
    chains are harder for it, and need a larger max_completion_length (4 tokens per operand, plus 6).

    Raises:
        UserError: If min_operands is below three or above max_operands, or if there are fewer chains than requested.
    """
    for setting, operands in (("data.min_operands", min_operands), ("data.max_operands", max_operands)):
        check_whole(setting, operands, MIN_OPERANDS)
    if min_operands > max_operands:
        raise UserError(
            f"data.min_operands={min_operands} and data.max_operands={max_operands} are not a range: use no "
            "maximum below the minimum"
        )
    numbers = min_operands, max_operands
    return Task(
        train_dataset=_dataset(num_train, numbers, held_out=False, seed=seed),
        eval_dataset=_dataset(num_eval, numbers, held_out=True, seed=seed),
        reward=arithmetic_reward,
        given_answer=only_answer,
        reward_range=(0.0, 1.0),
    )


def arithmetic_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Return 1.0 for each completion with one `<answer>…</answer>` that contains exactly the answer, otherwise 0.0.

    A second opening or closing tag anywhere scores 0.0: listing several answers counts as giving none.

    >>> arithmetic_reward(["9-3=6</think><answer>6</answer>", "6"], answer=["6", "6"])
    [1.0, 0.0]
    """
    return [float(only_answer(text) == right) for text, right in zip(completions, answer, strict=True)]


def worked_examples(
    seed: int, min_operands: int = MIN_OPERANDS, max_operands: int = MAX_OPERANDS
) -> Iterator[WorkedExample]:
    """Yield right answers to training chains, endlessly: half with the running result, half with only the answer.

    Examples: `7+2=9-3=6</think><answer>6</answer>` and `</think><answer>6</answer>`.
    """
    rng = random.Random(seed)
    while True:
        chain = _draw(rng, (min_operands, max_operands))
        if is_held_out(_prompt(chain)):
            continue
        pairs = zip(_steps(chain), chain[1:], strict=True)
        running = str(chain[0]) + "".join(f"{step}={result}" for step, result in pairs)
        thought = running if rng.random() < 0.5 else ""
        yield WorkedExample(_prompt(chain), f"{thought}</think><answer>{chain[-1]}</answer>")


def _dataset(num_rows: int, operands: tuple[int, int], *, held_out: bool, seed: int) -> Dataset:
    rng = random.Random(f"{seed}, held out: {held_out}")
    chains = (_draw(rng, operands) for _ in count())
    answers = distinct_rows(((_prompt(chain), str(chain[-1])) for chain in chains), num_rows, held_out=held_out)
    return Dataset.from_dict({"prompt": list(answers), "answer": list(answers.values())})


def _draw(rng: random.Random, operands: tuple[int, int]) -> Chain:
    results = [rng.randrange(10)]
    for _ in range(rng.randint(*operands) - 1):
        results.append((results[-1] + rng.randrange(1, 10)) % 10)
    return tuple(results)


def _steps(chain: Chain) -> list[str]:
    """Return the signed operands after the first, such as `["+2", "-3"]`."""
    return [f"{after - before:+d}" for before, after in pairwise(chain)]


def _prompt(chain: Chain) -> str:
    """Return the exercise as the model reads it, such as `7+2-3=?<think>`."""
    return f"{chain[0]}{''.join(_steps(chain))}=?<think>"

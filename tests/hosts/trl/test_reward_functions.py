"""A broken reward function is named, with its mistake: it raises, needs a missing column, or returns no numbers."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from since import since
from trl import GRPOTrainer

from rl_training import attach
from rl_training.errors import UserError
from rl_training.hosts.trl.reward_functions import named_rewards
from rl_training.hosts.trl.rollouts.batches import total_rewards


def raises(completions: list[str], **columns: Any) -> list[float]:
    raise ZeroDivisionError("no tests ran")


class OfTheUser(Exception):
    """An exception that the script around the training catches."""


def cuts_off(completions: list[str], **columns: Any) -> list[float]:
    raise OfTheUser


def asks(completions: list[str], solution: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def looks_up(completions: list[str], **columns: Any) -> list[float]:
    return [float(target == "x") for target in columns["target"]]


def words(completions: list[str], **columns: Any) -> list[str]:
    return ["good"] * len(completions)


def nothing(completions: list[str], **columns: Any) -> None:
    pass


async def later(completions: list[str], **columns: Any) -> int:
    return 1


def leaves(completions: list[str], **columns: Any) -> None:
    sys.exit(0)


def one(completions: list[str], **columns: Any) -> list[float]:
    return [1.0]


def one_for_each(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def lengths(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


async def one_later(completions: list[str], **columns: Any) -> list[float]:
    return [1.0]


class Judge:
    """A callable object."""

    __name__ = "judge"

    def __call__(self, completions: list[str], **columns: Any) -> list[str]:
        return ["bad"]


GIVEN = {"prompts": ["1", "2"], "completions": ["a", "b"], "completion_ids": [[1], [2]], "answer": ["3", "4"],
         "trainer_state": None}  # fmt: skip


def named(function: Any, name: str) -> Any:
    """Return the function as a trainer with probes wraps it."""
    trainer: Any = SimpleNamespace(reward_funcs=[function], reward_func_names=[name])
    with named_rewards(trainer):
        (changed,) = trainer.reward_funcs
    return changed


@pytest.mark.parametrize(
    ("function", "kind", "note"),
    [
        (raises, ZeroDivisionError, r"raises failed \(.*functions.py:\d+\); the data set .* prompt, answer$"),
        (asks, TypeError, "asks failed .* has the columns prompt, answer$"),
        (looks_up, KeyError, "looks_up failed .* has the columns prompt, answer$"),
        (words, ValueError, "words failed"),
        (nothing, TypeError, "nothing failed"),
        (later, TypeError, "later failed"),
        (Judge(), ValueError, "judge failed"),
        (cuts_off, OfTheUser, "cuts_off failed"),
    ],
)
def test_an_error_of_a_reward_function_is_raised_unchanged_with_a_note_naming_it(
    function: Any, kind: type[Exception], note: str
) -> None:
    changed = named(function, getattr(function, "__name__", ""))
    is_async = inspect.iscoroutinefunction(function)
    assert inspect.iscoroutinefunction(changed) == is_async  # TRL runs async functions concurrently
    with pytest.raises(kind) as caught:
        asyncio.run(changed(**GIVEN)) if is_async else changed(**GIVEN)
    assert caught.type is kind
    (said,) = caught.value.__notes__
    assert re.match(f"reward function {note}", said)


def test_a_reward_function_may_exit_the_program() -> None:
    with pytest.raises(SystemExit):
        named(leaves, "leaves")(**GIVEN)


def test_rewards_none_and_reward_models_are_passed_through() -> None:
    assert named(lambda completions, **_: [None, 2], "f")(**GIVEN) == [None, 2]
    assert named(lambda completions, **_: torch.tensor([0.5, 2.0]), "f")(**GIVEN) == [0.5, 2.0]
    model = torch.nn.Linear(1, 1)
    assert named(model, "a reward model") is model


def test_a_response_that_no_function_scores_has_no_reward() -> None:
    trainer: Any = SimpleNamespace(reward_weights=torch.tensor([2.0, 1.0]))
    by_function = torch.tensor([[1.0, torch.nan], [torch.nan, torch.nan], [0.5, 3.0]])
    assert str(total_rewards(trainer, by_function).tolist()) == "[2.0, nan, 4.0]"


def test_arguments_reach_a_reward_function_unchanged() -> None:
    """TRL calls the rewards of environments positionally and without completions."""
    owned = named(lambda environments, bonus=0, **kwargs: [e + bonus if e else None for e in environments], "f")
    assert owned([1.0, None], environments_seen=2) == owned(environments=[1.0, None]) == [1.0, None]
    assert owned([1.0, None], 2) == [3.0, None]
    with pytest.raises(TypeError, match="'environments'") as caught:
        owned()
    assert re.fullmatch(r"reward function f failed \(.*\)", *caught.value.__notes__)


@since("trl 1.10.0")
@pytest.mark.parametrize("function", [one, one_later])
def test_too_few_rewards_are_refused_by_name_in_one_line(make_trainer: Any, function: Any) -> None:
    """At any step, reported as the user's mistake and not with a traceback through TRL."""
    trainer = make_trainer(reward=function)
    with pytest.raises(UserError, match=f"^step 1: .*'{function.__name__}' .*1 rewards.* 2 "):
        trainer._calculate_rewards([{"prompt": "1"}] * 2, ["1"] * 2, ["2"] * 2, [[3]] * 2)


def test_reward_errors_of_a_custom_trainer_are_named_until_probes_are_removed(make_trainer: Any) -> None:
    trainer = make_trainer(GRPOTrainer, reward=asks)
    arguments = [{"prompt": "1+1=", "answer": "2"}], ["1+1="], ["2"], [[3]]
    with attach(trainer, probes=[]), pytest.raises(TypeError) as named_error:
        trainer._calculate_rewards(*arguments)
    with pytest.raises(TypeError) as bare:
        trainer._calculate_rewards(*arguments)
    notes_of_errors = [getattr(caught.value, "__notes__", []) for caught in (named_error, bare)]
    assert [["asks failed" in note for note in notes] for notes in notes_of_errors] == [[True], []]


def test_reward_functions_that_are_changed_while_probes_are_attached_count_at_once_and_stay(make_trainer: Any) -> None:
    """In the list that the trainer was given, too."""
    functions = [one_for_each]
    trainer = make_trainer(GRPOTrainer, reward=functions)
    rewards = []
    arguments = [{"prompt": "1"}] * 2, ["1"] * 2, ["22", "2"], [[3]] * 2
    with attach(trainer, probes=[]):
        functions[0] = lengths
        rewards.append(trainer._calculate_rewards(*arguments).tolist())
        trainer.reward_funcs.append(one_for_each)
        trainer.reward_func_names.append("one_for_each")
        trainer.reward_processing_classes.append(None)
        rewards.append(trainer._calculate_rewards(*arguments).tolist())
    rewards.append(trainer._calculate_rewards(*arguments).tolist())
    assert rewards == [[[2.0], [1.0]], [[2.0, 1.0], [1.0, 1.0]], [[2.0, 1.0], [1.0, 1.0]]]
    assert trainer.reward_funcs is functions

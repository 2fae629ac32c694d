"""A state is a value stored in named tensors: it is restored exactly, or the mistake is reported."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.parallel.state_tensors import from_tensors, tensors_by_name, to_tensors


@dataclass(frozen=True)
class Inner:
    values: Tensor = field(default_factory=lambda: torch.zeros(0, 2))
    is_full: bool = False


@dataclass(frozen=True)
class Outer:
    count: int = 0
    mean: float = math.nan
    inner: Inner = field(default_factory=Inner)
    named: dict[str, Inner] = field(default_factory=lambda: {"a.b": Inner(), "a": Inner()})
    nothing: None = None


FULL = Outer(3, 0.1, Inner(torch.ones(2, 2), True), {"a.b": Inner(torch.ones(1, 2)), "a": Inner(is_full=True)})


@pytest.mark.parametrize("state", [None, 2, 0.1, torch.ones(2), {"a": 1}, FULL])
def test_a_state_round_trips_unchanged(state: Any) -> None:
    like = Outer() if state is FULL else state
    assert repr(from_tensors(like, to_tensors(state))) == repr(state)


def test_tensors_are_named_by_their_paths() -> None:
    assert [*to_tensors(FULL)] == [
        "count", "mean", "inner.values", "inner.is_full",
        "named.a.b.values", "named.a.b.is_full", "named.a.values", "named.a.is_full",
    ]  # fmt: skip


def test_new_keys_of_a_mapping_start_fresh_and_removed_ones_are_dropped() -> None:
    before = dataclasses.replace(FULL, named={"a": Inner(is_full=True), "gone": Inner()})
    after = from_tensors(Outer(), to_tensors(before))
    assert (after.named["a"].is_full, after.named["a.b"].is_full) == (True, False)
    assert after.named.keys() == {"a", "a.b"}


@pytest.mark.parametrize(
    ("like", "state", "said"),
    [
        (Outer(), Inner(), "it lacks count"),
        (Inner(), {"values": torch.zeros(1, 2), "is_full": False, "more": 1}, "it also holds more, "),
        (None, 2, "it also holds value, "),
        (Inner(torch.zeros(3, 2)), Inner(torch.zeros(4, 2)), r"values has shape \(4, 2\), not \(3, 2\)"),
        (Inner(), Inner(torch.zeros(4, 3)), r"values has shape \(4, 3\), not \(0, 2\)"),
        (Inner(), Inner(torch.zeros(4)), r"values has shape \(4,\), not \(0, 2\)"),
    ],
)
def test_a_state_of_another_kind_is_refused_naming_the_difference(like: Any, state: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_tensors(like, to_tensors(state))


def test_a_value_that_no_checkpoint_can_hold_is_refused_with_its_path_and_probe() -> None:
    with pytest.raises(UserError, match=r"^probe 'mine': .*inner .*list$"):
        tensors_by_name({"mine": dataclasses.replace(FULL, inner=[1])})
    with pytest.raises(UserError, match=r"^probe 'mine': .* 'a' .* 'a\.'"):
        tensors_by_name({"mine": {"a": {"x": 1}, "a.b": 2}})  # otherwise a resumed run would lose "a.b"

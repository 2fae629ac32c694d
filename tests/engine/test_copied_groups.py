"""Copies of a group of responses are found whatever their padding and rank, and certain responses are no copies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from example_steps import ALONE
from ranks_in_threads import on_two_ranks
from torch import Tensor

from rl_training.engine.copied_groups import find_copies
from rl_training.parallel.ranks import Ranks
from rl_training.policy.rollout import as_rollout, join_rollouts
from rl_training.policy.scores import Scores
from rl_training.step.batch import NO_COPIES, Copies

G = 2


def copies_of(groups: list[tuple[list[int], list[list[int]]]], logp: float = -1.0, ranks: Ranks = ALONE) -> Copies:
    """Return the copies among these groups, a prompt and its responses each, whose tokens have this log-probability."""
    parts = []  # each padded by itself
    for number, (prompt, responses) in enumerate(groups):
        prompts = [torch.tensor(prompt)] * len(responses)
        parts.append(as_rollout(prompts, list(map(torch.tensor, responses)), [number] * len(responses), pad=0))
    rollout = join_rollouts(parts)
    mask = rollout.completion_mask
    return find_copies(rollout, Scores(logp * torch.ones_like(mask, dtype=torch.float32), mask, mask), ranks)


A = ([5, 6], [[1] * 9, [2] * 8])
B = ([5, 6], [[2] * 8, [1] * 9])  # the same responses in another order
D = ([5, 6], [[2] * 9, [1] * 9])
C = ([7, 5, 6], [[1] * 9, [2] * 8])


def test_a_group_and_its_copies_are_one_unit() -> None:
    found = copies_of([A, D, C, B])
    assert found.unit is not None
    assert found.unit.tolist() == [0, 0, 1, 1, 2, 2, 0, 0]
    assert found.response is not None
    a, b, *others, last_b, last_a = found.response.tolist()
    assert (a, b) == (last_a, last_b)  # each response is matched with its copy
    assert len({a, b, *others}) == 6
    assert found.reason is not None
    assert "only 3 of the 4 groups" in found.reason
    assert not found.on_several_ranks
    assert copies_of([A, D, C]) == NO_COPIES
    assert copies_of([([5, 0], [[0] * 9, [0] * 8]), ([5, 0], [[0] * 9, [0] * 7])]) == NO_COPIES  # 0 is a token like any


def test_repeated_groups_of_a_certain_policy_are_no_copies() -> None:
    """At -.01 nats per token a group of 17 tokens recurs with probability .84. At -1 its recurrence is no chance.

    A group of 16 different responses has 16! orders, so it recurs far more often than in the same order.
    """
    assert copies_of([A, A, A], logp=-0.01) == NO_COPIES
    assert copies_of([A, A, A], logp=-1.0).reason is not None
    assert copies_of([A, A, A], logp=float("nan")) == NO_COPIES
    many = ([5, 6], [[n] for n in range(16)])
    assert copies_of([many, many], logp=-1.8) == NO_COPIES
    assert copies_of([many, ([5, 6], many[1][::-1])], logp=-3.0).reason is not None


def test_copies_on_another_rank_are_found() -> None:
    def found(rank: int, reduce: Callable[[Tensor], Tensor]) -> Copies:
        return copies_of([A, B] if rank else [A], ranks=Ranks(2, reduce, rank))

    first, second = on_two_ranks(found)
    assert first.on_several_ranks
    assert second.on_several_ranks
    assert first.reason == second.reason
    assert first.reason.code == "copied_groups"

"""Joining a step's microbatches: what is known about the samplers of some is decided for all, on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from example_steps import ALONE
from ranks_in_threads import on_two_ranks
from torch import Tensor

from rl_training.engine.open_step import OpenStep
from rl_training.parallel.ranks import Ranks
from rl_training.policy.rollout import Origin, Rollout, join_origins, join_rollouts
from rl_training.policy.scores import Scores
from rl_training.statistics.unavailable import Unavailable

IDS = torch.ones(2, 3, dtype=torch.long)
OWN = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
FRESH = Rollout(IDS, IDS, IDS, IDS, torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.long))
STALE = dataclasses.replace(FRESH, on_policy=False, sampling_logps=OWN - 1, old_logps=OWN - 1)
OF_ENGINE = dataclasses.replace(FRESH, sampling_logps=OWN - 2)
UNKNOWN = dataclasses.replace(FRESH, on_policy=False)


def joined(parts: list[Rollout], ranks: Ranks = ALONE) -> Rollout:
    scores = [Scores(OWN, OWN, IDS)] * len(parts)
    return OpenStep(1, [], rollouts=list(parts), scores=scores).join_on_all_ranks(ranks)


def test_joined_with_off_policy_samples_on_policy_ones_get_the_policys_log_probabilities() -> None:
    rollout = joined([FRESH, STALE])
    assert not rollout.on_policy
    for name in ("sampling_logps", "old_logps"):
        assert torch.equal(getattr(rollout, name), torch.cat([OWN, OWN - 1]))


def test_old_log_probabilities_that_an_off_policy_microbatch_lacks_are_its_samplers() -> None:
    rollout = joined([STALE, dataclasses.replace(OF_ENGINE, on_policy=False), OF_ENGINE])
    assert torch.equal(rollout.old_logps, torch.cat([OWN - 1, OWN - 2, OWN]))
    assert torch.equal(rollout.sampling_logps, torch.cat([OWN - 1, OWN - 2, OWN - 2]))


@pytest.mark.parametrize("parts", [[FRESH, STALE], [STALE, FRESH]], ids=["stale last", "stale first"])
def test_a_joined_rollout_with_a_stale_part_is_not_on_policy(parts: list[Rollout]) -> None:
    assert not join_rollouts(parts).on_policy
    assert join_rollouts([FRESH, FRESH]).on_policy


def test_fresh_samples_have_no_sampling_logps_and_those_of_an_engine_no_old_logps() -> None:
    rollout = joined([FRESH, FRESH])
    assert rollout.on_policy
    assert rollout.sampling_logps is rollout.old_logps is None
    rollout = joined([OF_ENGINE, OF_ENGINE])
    assert rollout.on_policy
    assert torch.equal(rollout.sampling_logps, torch.cat([OWN - 2, OWN - 2]))
    assert rollout.old_logps is None


def test_one_microbatch_of_an_unknown_policy_leaves_the_ratios_of_all_unknown() -> None:
    rollout = joined([FRESH, STALE, UNKNOWN])
    assert not rollout.on_policy
    assert rollout.sampling_logps is rollout.old_logps is None
    assert rollout.rewards is not None


def test_one_microbatch_without_rewards_leaves_all_rewards_unknown() -> None:
    assert joined([FRESH, dataclasses.replace(FRESH, rewards=None)]).rewards is None


@pytest.mark.parametrize(
    ("of_second_rank", "expected"),
    [
        (STALE, [0.0, 1.0, 1.0, 1.0]),
        (UNKNOWN, [0.0, 0.0, 0.0, 1.0]),
        (dataclasses.replace(FRESH, rewards=None), [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_all_processes_agree_on_which_rollout_fields_are_known(of_second_rank: Rollout, expected: list[float]) -> None:
    """This holds for on-policy, sampler's and old log-probabilities, and rewards. Otherwise ranks would deadlock."""

    def known_on_rank(rank: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        rollout = joined([FRESH if rank == 0 else of_second_rank], Ranks(2, reduce, rank))
        known: list[Any] = [rollout.sampling_logps, rollout.old_logps, rollout.rewards]
        return torch.tensor([float(rollout.on_policy), *(float(value is not None) for value in known)])

    assert [flags.tolist() for flags in on_two_ranks(known_on_rank)] == [expected] * 2


def test_reasons_of_one_microbatchs_origin_apply_to_the_step() -> None:
    drawn, unlike = Unavailable("not_generated", "drawn elsewhere"), Unavailable("uneven_prompts", "unlike")
    top_p = Unavailable("sampling_mismatch", "top-p")
    parts = [Origin(), Origin(drawn, None, True), Origin(groups_reason=unlike, knows_sampler=True)]
    assert join_origins(parts) == Origin(drawn, unlike, learned=True, knows_sampler=True)
    assert join_origins([*parts, Origin(sampler_reason=top_p)]).sampler_reason == top_p
    assert join_origins([Origin()] * 2) == Origin()  # nothing is known: the loop decides

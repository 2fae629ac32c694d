"""What a process knows of a rollout besides TRL's batch, by hand: weighted rewards, prompts across processes."""

from __future__ import annotations

import dataclasses
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks_in_threads import on_two_ranks

from rl_training.hosts.trl.rollouts import batches
from rl_training.hosts.trl.rollouts import current as module
from rl_training.hosts.trl.rollouts import kind as batch_kind
from rl_training.hosts.trl.rollouts.current import Rollouts
from rl_training.hosts.trl.rollouts.kind import UNEVEN
from rl_training.hosts.trl.rollouts.old_logps import without_own_logps
from rl_training.hosts.trl.rollouts.prompt_numbers import PROMPT
from rl_training.parallel.ranks import Ranks
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores

NONE: Any = None


@pytest.fixture(autouse=True)
def sampled_as_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "sampling_reason", lambda trainer, scored_temperature: None)


def rollouts_of(rank: int, per_device: int = 2, steps: int = 3, generations: int = 4) -> Rollouts:
    """Return the rollouts of a stub trainer that has only the attributes they read."""
    trainer: Any = SimpleNamespace(
        reward_weights=torch.tensor([2.0, 0.5]), accelerator=SimpleNamespace(process_index=rank, num_processes=2),
        args=SimpleNamespace(
            per_device_train_batch_size=per_device, steps_per_generation=steps, num_iterations=1,
            gradient_accumulation_steps=steps,
        ),
        num_generations=generations, mask_truncated_completions=False, state=SimpleNamespace(global_step=0),
        eos_token_ids=[2], processing_class=SimpleNamespace(pad_token_id=0), model=SimpleNamespace(training=True),
        _step=0,
    )  # fmt: skip
    scorer = SimpleNamespace(temperature=1.0)
    policy: Any = SimpleNamespace(model=torch.nn.Identity(), scorer=scorer)  # without dropout
    return Rollouts(trainer, policy)


def test_a_response_masked_by_the_loss_is_read_with_its_tokens_and_no_advantage() -> None:
    ids = torch.tensor([[5, 6, 0], [5, 7, 8]])
    seen = {"completion_ids": ids, "completion_mask": torch.tensor([[1, 1, 0], [0, 0, 0]])}
    of_prompts = {"prompt_ids": ids, "prompt_mask": torch.ones_like(ids), PROMPT: torch.zeros(2).long()}
    for of_tokens in (False, True):
        advantages = torch.tensor([[0.5] * 3, [-0.5] * 3]) if of_tokens else torch.tensor([0.5, -0.5])
        rollout = batches.read_rollout({**seen, **of_prompts, "advantages": advantages}, 0, True, pad_token_id=0)
        assert rollout.completion_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
        assert rollout.advantages.tolist() == [0.5, 0.0]


def batch(size: int) -> dict[str, Any]:
    """Return TRL's output for `size` sequences of one token."""
    ones = torch.ones(size, 1, dtype=torch.long)
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    return {**dict.fromkeys(names, ones), "advantages": torch.zeros(size)}


@pytest.mark.parametrize(("rank", "expected"), [(0, [4.0, 1.0]), (1, [-2.0, 3.5])])
def test_the_reward_of_a_response_is_the_weighted_sum_of_its_functions(rank: int, expected: list[float]) -> None:
    """2 · 1 + .5 · 4; then .5 · 2, because the first function returns None. The last two are the other process's."""
    by_function = torch.tensor([[1.0, 4.0], [math.nan, 2.0], [-1.0, 0.0], [1.0, 3.0]])
    rollouts = rollouts_of(rank)
    rollouts._generated.add([[1], [1]], [[1], [1]], None)
    rollouts.add_rewards(by_function)
    output = batch(2)
    rollouts.begin_rollout(output, is_measured=False)
    assert output[batches.REWARD].tolist() == expected


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 0, 0, 0, 1, 1]), (1, [0, 0, 1, 1, 1, 1])])
def test_a_prompt_with_responses_on_two_processes_counts_once(rank: int, expected: list[int]) -> None:
    """Six sequences on each process, four per prompt: the second prompt has two on each."""
    rollouts = rollouts_of(rank)
    output = batch(6)
    rollouts.begin_rollout(output, is_measured=False)
    assert (rollouts.read(output).prompt_index - rollouts.current.number * 6).tolist() == expected


# --- matching a batch's rows with what was generated ------------------------------------------------------------------


def output_of(rows: list[tuple[int, int]], **more: Any) -> dict[str, Any]:
    """Return TRL's output for rows of (prompt, response) with one token each."""
    prompts, completions = (torch.tensor(column).unsqueeze(1) for column in zip(*rows, strict=True))
    ones = torch.ones_like(prompts)
    batch = {"prompt_ids": prompts, "prompt_mask": ones, "completion_ids": completions, "completion_mask": ones}
    return batch | {"advantages": torch.zeros(len(rows))} | more


def begun(rollouts: Rollouts, rows: list[tuple[int, int]], of_batch: list[tuple[int, int]], **more: Any) -> Any:
    """Begin a batch with rows `of_batch`, from a rollout that generated `rows`, and return the batch as it is read."""
    rollouts._generated.add([[prompt] for prompt, _ in rows], [[response] for _, response in rows], None)
    rollouts._generated.reward([float(number) for number in range(len(rows))])
    output = output_of(of_batch, **more)
    rollouts.begin_rollout(output, is_measured=True)
    return rollouts.read(output)


ROWS = [(1, 11), (1, 12), (2, 13), (2, 14), (3, 15), (3, 16)]  # three prompts with two responses each


@pytest.mark.parametrize(
    ("rows", "group", "prompts", "rewards", "code", "counts"),
    [
        (ROWS, 2, [0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5], "", ""),
        (ROWS[::-1], 2, [0, 0, 1, 1, 2, 2], [5, 4, 3, 2, 1, 0], "", ""),
        ([ROWS[i] for i in (0, 2, 4, 1, 3, 5)], 2, [0, 1, 2, 0, 1, 2], [0, 2, 4, 1, 3, 5], "", ""),
        (ROWS[:4], 2, [0, 0, 1, 1], [0, 1, 2, 3], "", ""),
        ([ROWS[i] for i in (0, 2, 5)], 1, [0, 1, 2], [0, 2, 5], "not_all_kept", "1 of the 2"),
        (ROWS[:5], 2, [0, 0, 1, 1, 2], [0, 1, 2, 3, 4], "uneven_prompts", ""),
        ([*ROWS[:5], (3, 99)], 2, [0, 0, 1, 1, 2, 2], None, "not_generated", "1 of the 6"),
        ([*ROWS, *ROWS[:0], (4, 17), (4, 18)], 2, [0, 0, 1, 1, 2, 2, 3, 3], None, "not_generated", "2 of the 8"),
    ],
)
def test_rows_in_any_order_have_their_own_prompts_rewards_and_origins(
    rows: list[tuple[int, int]],
    group: int,
    prompts: list[int],
    rewards: list[float] | None,
    code: str,
    counts: str,
) -> None:
    rollouts = rollouts_of(0, generations=2)
    rollout_begun = begun(rollouts, ROWS, rows)
    assert (rollout_begun.prompt_index - 6).tolist() == prompts
    assert rollouts.current.responses_per_prompt == group
    assert (None if rollout_begun.rewards is None else rollout_begun.rewards.tolist()) == rewards
    reason = rollout_begun.origin.sample_reason
    assert ("" if reason is None else reason.code) == code
    assert counts in (reason or "")


@pytest.mark.parametrize(("key", "is_untested"), [("", False), (batches.UNTESTED, True), (batches.BUFFER_REWARD, True)])
def test_a_rollout_is_untested_if_a_buffer_has_chosen_it_or_a_subclass_says_so(key: str, is_untested: bool) -> None:
    """All rows that were generated are in it. The buffer's rewards are those of its rows."""
    rollout_begun = begun(rollouts_of(0, generations=2), ROWS, ROWS, **{key: torch.ones(6)})
    assert rollout_begun.untested == is_untested
    assert rollout_begun.rewards.tolist() == ([1.0] * 6 if key == batches.BUFFER_REWARD else [0, 1, 2, 3, 4, 5])


def test_a_prompt_drawn_twice_counts_as_two_while_rows_keep_their_order() -> None:
    rollouts = rollouts_of(0, generations=2)
    rows = [(1, 11), (1, 12), (1, 13), (1, 14), (1, 15), (1, 16)]
    assert (begun(rollouts, rows, rows).prompt_index - 6).tolist() == [0, 0, 1, 1, 2, 2]
    assert rollouts.current.responses_per_prompt == 2


@pytest.mark.parametrize(("learned", "again"), [(True, ROWS[:1]), (False, ROWS[4:5])])
def test_a_row_of_an_earlier_rollout_is_reused_if_a_step_has_learned_from_it(learned: bool, again: Any) -> None:
    """It is also off-policy, with the batch's log-probabilities."""
    rollouts = rollouts_of(0, generations=2)
    begun(rollouts, ROWS, ROWS[:4])
    logps = torch.zeros(6, 1)
    more = {batches.OLD_LOGPS: logps}
    rollout_begun = begun(
        rollouts, [(7, 1), (7, 2), (8, 3), (8, 4), (9, 5), (9, 6)], [*again, (7, 2), *[(8, 3), (8, 4)] * 2], **more
    )
    assert rollout_begun.origin.learned == learned
    assert not rollout_begun.on_policy
    assert torch.equal(rollout_begun.sampling_logps, logps)


def test_a_foreign_row_on_one_process_makes_the_sample_unknown_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(rank: int, reduce: Any) -> torch.Tensor:
        monkeypatch.setattr(batch_kind, "all_ranks", lambda: ranks[threading.get_ident()])
        ranks[threading.get_ident()] = Ranks(2, reduce, rank)
        rollouts = rollouts_of(0, generations=2)
        read = begun(rollouts, ROWS, ROWS if rank == 0 else [*ROWS[:5], (3, 99)])
        reasons.append(read.origin.sample_reason)
        return torch.tensor([read.on_policy, read.rewards is None])

    ranks: dict[int, Ranks] = {}
    reasons: list[str] = []
    assert [tensor.tolist() for tensor in on_two_ranks(found)] == [[False, True]] * 2
    assert reasons[0] == reasons[1]
    assert reasons[0].startswith("1 of the 12 responses")


def test_unequal_groups_on_one_process_are_reported_by_all(monkeypatch: Any) -> None:
    def found(rank: int, reduce: Any) -> torch.Tensor:
        monkeypatch.setattr(batch_kind, "all_ranks", lambda: ranks[threading.get_ident()])
        ranks[threading.get_ident()] = Ranks(2, reduce, rank)
        rollouts = rollouts_of(0, generations=2)
        read = begun(rollouts, ROWS, ROWS[:4] if rank == 0 else [ROWS[0], ROWS[2]])
        return torch.tensor([rollouts.current.responses_per_prompt, read.origin.groups_reason == UNEVEN])

    ranks: dict[int, Ranks] = {}
    assert [tensor.tolist() for tensor in on_two_ranks(found)] == [[2, True]] * 2


@pytest.mark.parametrize(
    ("apart", "rounded", "is_own"),
    [(0.005, "", True), (0.02, "", False), (0.02, "bf16", True), (0.2, "bf16", False)],
)
def test_old_log_probabilities_within_rounding_count_as_the_policys_own(
    apart: float, rounded: str, is_own: bool
) -> None:
    """Only tokens that training scored count: the second row is hidden, and the second column is padding."""
    policy: Any = SimpleNamespace(scorer=SimpleNamespace(training_rounding=rounded))
    ids, mask = torch.ones(2, 2, dtype=torch.long), torch.tensor([[1, 0], [1, 1]])
    now = torch.tensor([[-1.0, 7.0], [9.0, 9.0]])
    before = torch.tensor([[-1.0 - apart, -7.0], [-9.0, -9.0]])
    rollout = Rollout(ids, ids, ids, mask, torch.zeros(2), None, torch.zeros(2), before, True, old_logps=before)
    scores, hidden = Scores(now, now, mask), torch.tensor([False, True])
    with_logps = without_own_logps(rollout, scores, hidden, policy, None)
    assert with_logps.on_policy == is_own
    assert (with_logps.old_logps is None) == is_own
    assert (with_logps.sampling_logps is None) == is_own
    of_engine = dataclasses.replace(rollout, sampling_logps=now)
    with_logps = without_own_logps(of_engine, scores, hidden, policy, None)
    assert with_logps.sampling_logps is now


@pytest.mark.parametrize(
    ("kept", "step", "count", "expected"),
    [
        ([4, 3, 2, 1], 0, 2, [4, 3]),
        ([4, 3, 2, 1], 2, 2, [2, 1]),
        ([4, 3, 2, 1], 2, 4, [2, 1, 2, 2]),  # two microbatches are not sampled yet
        ([], 0, 3, [5, 5, 5]),  # a subclass keeps its microbatches elsewhere
    ],
)
def test_a_step_is_planned_with_the_sizes_of_the_buffered_microbatches(
    kept: list[int], step: int, count: int, expected: list[int]
) -> None:
    rollouts = rollouts_of(0, steps=4)
    trainer: Any = rollouts._trainer
    trainer.current_gradient_accumulation_steps, trainer._step = count, step
    parts = [batch(size) for size in kept]
    trainer._buffered_inputs = parts or None
    assert rollouts.sizes_of_step(parts[step] if parts else batch(5)) == expected

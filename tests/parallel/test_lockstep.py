"""No rank runs more passes or sums than another: with sharded weights each is a collective, and a rank would wait.

Two ranks with different numbers of sequences and prompts run everything that scores or samples in several passes, as
threads of one process whose forward passes wait for each other (`CountingRanks`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_steps import scored
from ranks_in_threads import CountingRanks, OutOfStep
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.engine.open_step import OpenStep
from rl_training.engine.step_reasons import reasons_of_sequences
from rl_training.errors import UserError
from rl_training.hosts import policy as host_policy
from rl_training.hosts.plain.measured_loop import FIXES
from rl_training.hosts.policy import HostPolicy
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.models.load import load_tiny
from rl_training.parallel.fold_vectors import adding_to
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sharding import Shard
from rl_training.policy.rollout import Origin, Rollout, as_rollout, take_rows
from rl_training.policy.scorer import Scorer
from rl_training.policy.scores import Scores
from rl_training.probes import GroundTruthProbe, SamplerProbe
from rl_training.probes.fresh_sample import score_in_other_batches
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.fold_reduction import FoldReduction
from rl_training.step.folds import FoldGroup, plan_folds
from rl_training.step.loss_weights import LossWeights
from rl_training.step.passes import Passes, Weightings
from rl_training.step.reasons import Reasons
from rl_training.step.score_check import ScoreCheck

BATCH_SIZE, G = 4, 2
NO_TRUTH = Unavailable("not_here", "this step has no entropy gradient")


def rollout_of(num_sequences: int) -> Rollout:
    """Return responses of different lengths, G to each prompt."""
    generator = torch.Generator().manual_seed(num_sequences)
    draws = [torch.randint(3, 90, (3 + i % 4,), generator=generator) for i in range(num_sequences)]
    return as_rollout(draws, draws, [i // G for i in range(num_sequences)], 0)


class Rank:
    """A rank's own copy of the policy, and its step."""

    def __init__(self, counting: CountingRanks, num_sequences: int) -> None:
        self.ranks = counting.current()
        self.rollout = rollout_of(num_sequences)
        model = copy.deepcopy(MODEL)
        scorer = Scorer(model, run_inside_forward=True)
        self.policy = HostPolicy(model, scorer, BATCH_SIZE, self.generate, None)
        rows = torch.arange(num_sequences)
        own = scorer.score(self.rollout, rows, graph=False)  # before its passes are watched
        self.batch = dataclasses.replace(
            scored(self.rollout, own, LossWeights(own.mask.float(), None)),
            microbatch_rows=(range(BATCH_SIZE),),
            fold_groups=[FoldGroup(range(k, k + 1), (0, 0), (range(BATCH_SIZE),)) for k in range(2)],
            fold=rows % 2,
            fold_sizes=torch.ones(2, dtype=torch.float64),
            responses_per_prompt=G,
        )
        counting.watch(model)
        shard = Shard(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
        self.policy.begin(shard, self.ranks)
        self.policy.lockstep_ranks = self.ranks
        self.passes = Passes(self.policy, self.ranks, FoldReduction(shard))

    def generate(self, count: int) -> Rollout:
        self.policy.model(input_ids=torch.ones(count, 2, dtype=torch.long))  # as each token takes one
        return rollout_of(count)

    def context(self) -> StepContext:
        optimizer: Any = SimpleNamespace(reason=None, rounding_reason="")
        prediction: Any = SimpleNamespace(
            settings=SimpleNamespace(per_sequence=False), reason=NO_TRUTH, is_seen_in_scores=False
        )
        step: Any = SimpleNamespace(number=1, batch=self.batch, reasons=Reasons(), optimizer=optimizer)
        return StepContext(step, self.passes, prediction)


MODEL = load_tiny()[0]


def score_all(rank: Rank) -> None:
    scores = rank.policy.score_rollout(rank.rollout)
    torch.testing.assert_close(scores.logps[scores.mask.bool()], rank.batch.scores.logps[scores.mask.bool()])


def score_own_rows_or_none(rank: Rank) -> None:
    rows = torch.arange(1, 1 + rank.ranks.number)  # the second rank has one, the first none
    scores = rank.policy.score_rollout(rank.rollout, batches=rank.policy.batches_of(rows))
    assert scores.logps.shape == scores.mask.shape == (len(rows), rank.rollout.completion_ids.shape[1])


def score_hidden_rows(rank: Rank) -> None:
    """Rows that the loss masks are on the second rank alone."""
    policy: Any = rank.policy
    hidden = torch.arange(rank.rollout.num_sequences) < 3 * rank.ranks.number
    scores = TrainerPolicy.with_hidden(policy, rank.batch.scores, rank.rollout, hidden)
    torch.testing.assert_close(scores.logps[scores.mask.bool()], rank.batch.scores.logps[scores.mask.bool()])


def score_in_halves(rank: Rank) -> None:
    """Score one sequence, which has no halves, on the first rank and two on the second."""
    rows = torch.arange(1 + rank.ranks.number)
    mask = rank.batch.scores.mask[rows].bool()
    scores = score_in_other_batches(rank.policy, take_rows(rank.rollout, rows))
    torch.testing.assert_close(scores.logps[mask], rank.batch.scores.logps[rows][mask])


def check_scores(rank: Rank) -> None:
    check = ScoreCheck(rank.batch, rank.policy)
    check.score_and_compare(torch.arange(rank.rollout.num_sequences))
    assert check._sums[2] == rank.rollout.completion_mask[:8].sum()  # a pass for the others' sake is not compared
    assert not check.difference_reason(rank.ranks)


def measure_numerics(rank: Rank) -> None:
    estimate = SamplerProbe(numerics=True).measure(rank.context(), None).estimates["sampler/numerics_kl"]
    assert estimate.value < 1e-9
    assert estimate.num_samples == 1 + 3  # prompts of both ranks


def sample_fresh(rank: Rank) -> None:
    for num_sequences in (2, 9, 33):
        fresh = rank.policy.sample(num_sequences, seed=1)
        assert fresh.prompt_index.tolist() == [*range(rank.ranks.number, num_sequences, 2)]
        assert fresh.num_sequences == len(fresh.prompt_index)


def measure_truth(rank: Rank) -> None:
    for num_sequences in (2, 3, 9):
        probe = GroundTruthProbe(sequences=num_sequences)
        reading = probe.after_step(rank.context(), probe.measure(rank.context(), None))
        assert abs(reading.estimates["delta_h/true"].value) < 1e-6  # the weights have not moved


def sum_gradients(rank: Rank) -> None:
    weights, shares = [rank.batch.loss_weights], torch.ones(rank.rollout.num_sequences, 1)
    weightings = Weightings(weights, shares)
    rank.passes.gradients_by_fold(rank.batch, weightings)
    rank.passes.gradients_by_fold(rank.batch, weightings, dtype=torch.float64)
    chosen = torch.arange(len(shares)) % 2 == 0  # of one fold alone
    total = rank.passes.layout.zeros(1)
    rank.passes.send_gradients(rank.batch, weightings, lambda index, folds: adding_to(total), is_chosen=chosen)
    seen: list[int] = []
    parts = torch.arange(len(shares)).split(1)
    rank.context().gradients_by_rank(parts, weights, shares, lambda vectors: seen.append(len(vectors)))
    assert seen == [1] * 6  # as many passes as the rank with the most, on both


CALLERS: list[Callable[[Rank], None]] = [
    score_all, score_own_rows_or_none, score_hidden_rows, score_in_halves, check_scores, measure_numerics,
    sample_fresh, measure_truth, sum_gradients,
]  # fmt: skip


@pytest.mark.parametrize("caller", CALLERS, ids=[caller.__name__ for caller in CALLERS])
def test_ranks_with_different_numbers_of_sequences_run_equally_many_passes(
    caller: Callable[[Rank], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = CountingRanks()
    monkeypatch.setattr(host_policy, "all_ranks", counting.current)
    counting.run(lambda ranks: caller(Rank(counting, (2, 6)[ranks.number])))
    assert counting.num_passes[0] == counting.num_passes[1] > 0


def test_a_loop_of_its_own_over_passes_is_out_of_step() -> None:
    """What CountingRanks is for: each of these would wait for ever with two processes."""

    def score_in_a_loop(ranks: Ranks) -> None:
        rank = Rank(counting, (2, 6)[ranks.number])
        for row in torch.arange(rank.rollout.num_sequences).split(1):
            rank.policy.scorer.score(rank.rollout, row, graph=False)

    def return_early(ranks: Ranks) -> Tensor:
        return ranks.reduce(torch.zeros(1)) if ranks.number else torch.zeros(1)

    def in_other_order(ranks: Ranks) -> None:
        for size in (1, 2) if ranks.number else (2, 1):
            ranks.reduce(torch.zeros(size))

    for function, said in ((score_in_a_loop, "a forward pass"), (return_early, "has ended"), (in_other_order, "(2,)")):
        counting = CountingRanks()
        with pytest.raises(OutOfStep, match=said.replace("(", r"\(").replace(")", r"\)")):
            counting.run(function)


def test_fewer_sequences_than_processes_is_one_error_on_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_policy, "all_ranks", (counting := CountingRanks()).current)

    def refused(ranks: Ranks) -> str:
        rank = Rank(counting, 2)
        with pytest.raises(UserError) as error:
            rank.policy.sample(1, seed=0)
        return str(error.value)

    first, second = counting.run(refused)
    assert first == second
    assert "1 sequences cannot be shared among 2 processes" in first
    assert counting.num_passes == [0, 0]


def test_a_sample_of_another_size_than_asked_is_an_error() -> None:
    policy = HostPolicy(MODEL, Scorer(MODEL), BATCH_SIZE, lambda count: rollout_of(count + 1), None)
    with pytest.raises(UserError, match=r"sample\(4\) returned 5 responses"):
        policy.sample(4, seed=0)


LOCAL_REASONS = {
    "not_generated": Origin(sample_reason=Unavailable("not_generated", "responses of a replay buffer")),
    "uneven_prompts": Origin(
        groups_reason=Unavailable("uneven_prompts", "prompts differ in their number of responses")
    ),
}


@pytest.mark.parametrize("code", [*LOCAL_REASONS, "no_sample"])
def test_what_one_process_alone_cannot_measure_no_process_measures(code: str) -> None:
    """Otherwise one process would return early from a collective in which the other waits."""

    def found(ranks: Ranks) -> list[bool]:
        origin = LOCAL_REASONS.get(code, Origin()) if ranks.number else Origin()
        no_sample = Unavailable(code, "no function to sample with") if ranks.number and code == "no_sample" else None
        loop: Any = SimpleNamespace(
            ranks=ranks, fixes=FIXES, reasons=Reasons(cannot_sample=no_sample), shard=SimpleNamespace(leaves={})
        )
        rollout: Any = SimpleNamespace(prompt_index=torch.tensor([0, 0, 1, 1]), num_sequences=4, origin=origin)
        step = OpenStep(1, [], fold_groups=plan_folds([4], 2, 2), sizes=[4], responses_per_prompt=2, rollouts=[rollout])
        reasons = reasons_of_sequences(step, loop, other_policy=None)
        return [bool(value) for value in vars(reasons).values()]

    first, second = CountingRanks().run(found)
    assert first == second
    assert any(first)


def test_truncated_responses_are_known_on_every_process_or_on_none() -> None:
    def joined(ranks: Ranks) -> bool:
        rollout = dataclasses.replace(rollout_of(2), truncated=torch.zeros(2).bool() if ranks.number else None)
        zeros = torch.zeros_like(rollout.completion_mask).float()
        step = OpenStep(1, [], rollouts=[rollout], scores=[Scores(zeros, zeros, rollout.completion_mask)])
        return step.join_on_all_ranks(ranks).truncated is None

    assert CountingRanks().run(joined) == [True, True]


@pytest.mark.parametrize("second", [(), ("length",), ("format", "right")])
def test_values_of_reward_functions_are_known_on_every_process_or_on_none(second: tuple[str, ...]) -> None:
    """Otherwise the processes would sum tables of different widths."""

    def names(ranks: Ranks) -> list[str]:
        of_rank = second if ranks.number else ("right", "format")
        rollout = dataclasses.replace(rollout_of(2), rewards_by_name={name: torch.zeros(2) for name in of_rank})
        zeros = torch.zeros_like(rollout.completion_mask).float()
        step = OpenStep(1, [], rollouts=[rollout], scores=[Scores(zeros, zeros, rollout.completion_mask)])
        return [*step.join_on_all_ranks(ranks).rewards_by_name]

    assert CountingRanks().run(names) == [[], []]
    second = ("right", "format")
    assert CountingRanks().run(names) == [["right", "format"]] * 2

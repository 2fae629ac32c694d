"""The totals of a step do not depend on how it is split into microbatches and folds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import plain_loop
import pytest
import reference
import torch
from layouts import by_another
from ranks_in_threads import on_two_ranks
from shared_rollouts import PROMPTS, G
from simple_twin import Answers, Recorder, Twin, per_sequence, per_token
from torch import Tensor
from trainers import graded
from trl import GRPOTrainer

from rl_training import Estimate, Rollout, attach, measured_loop
from rl_training.engine.fold_placement import choose_folds, fewest_prompts, fold_of_rows, may_recompute, num_folds_in
from rl_training.engine.loss_info import OTHER_TERMS
from rl_training.models.load import load_tiny
from rl_training.parallel.ranks import Ranks
from rl_training.policy.rollout import take_rows
from rl_training.step.folds import FoldSource, plan_folds
from rl_training.step.needs import Need
from rl_training.step.reasons import MIXED_PROMPTS, SPLIT_PROMPTS, Reasons

ROLLOUTS = {1: 1, 2: 3}  # by step: the number of the given rollout that it trains on
TOTALS = ["delta_h/backward", "delta_h/reuse", "delta_h/backward_sequence", "delta_h/reuse_sequence"]
TOTALS += ["entropy/token", "entropy/sequence"]
# Sequences per microbatch, number of microbatches, whether prompts are spread over them, and possible numbers of folds.
LAYOUTS: list[tuple[int, int, bool, Sequence[int | None]]] = [
    (4, 8, True, (None, 3, 7)),
    (4, 8, False, (None, 7)),
    (2, 18, True, (None, 4)),  # 9 prompts
    (12, 3, True, (None, 2)),
    (12, 3, False, (3, 9)),  # a microbatch has the prompts of three of 9 folds
    (36, 1, True, (None, 9)),
    (6, 6, False, (None, 2)),  # a prompt and a half in each
]


@functools.cache
def sequences(number: int, count: int, shuffled: bool, sampler: bool) -> Rollout:
    """Return the last `count` sequences of a step, which are short, in the order of its microbatches."""
    rollout = plain_loop.rollout_of(ROLLOUTS[number])
    if sampler:
        rollout = by_another(load_tiny()[0].double(), rollout, number)
    rows = torch.arange(PROMPTS * G)[-count:]
    if shuffled:
        rows = rows[torch.randperm(count, generator=torch.Generator().manual_seed(number))]
    return take_rows(rollout, rows)


def totals(
    size: int, count: int, shuffled: bool, num_folds: int | None, responses: int, sampler: bool = False
) -> list[float]:
    """Return TOTALS at the second of two steps of a loop."""
    estimates = measured_at(size, count, shuffled, num_folds, responses, sampler)
    return [estimates[name].value for name in TOTALS]


@functools.cache
def measured_at(
    size: int, count: int, shuffled: bool, num_folds: int | None, responses: int, sampler: bool
) -> dict[str, Estimate]:
    """Return the estimates at the second of two steps of a loop, which all tests share."""
    model = load_tiny()[0].double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, eps=1e-5, weight_decay=0.1)
    probe = Answers(num_folds=num_folds, responses_per_prompt=responses, per_sequence=True)
    with measured_loop(
        model, optimizer, [probe], responses_per_prompt=G, microbatch_size=size, microbatches=count, dr_grpo=True
    ) as measured:
        for number in ROLLOUTS:
            with measured.step(number):
                rollout = sequences(number, size * count, shuffled, sampler)
                for part in (take_rows(rollout, rows) for rows in torch.arange(size * count).split(size)):
                    logps, entropies = plain_loop.scores_of(model, part)
                    measured.microbatch(part, logps, entropies.detach())
                    plain_loop.loss_of(logps, part, count).backward()
                measured.gradients_ready()
                optimizer.step()
                optimizer.zero_grad()
    return probe.all[1]


@pytest.mark.parametrize("layout", LAYOUTS, ids="{0[0]}x{0[1]} shuffled={0[2]}".format)
def test_no_total_depends_on_the_number_of_folds(layout: tuple[int, int, bool, Sequence[int | None]]) -> None:
    """They agree up to rounding of X, because the head computes in fp32."""
    size, count, shuffled, folds = layout
    responses = 1 + (size + count) % G if (size, count) != (4, 8) else G  # with G the next test has the same steps
    first, *others = (totals(size, count, shuffled, number, responses, sampler=size == 12) for number in folds)
    assert all(map(math.isfinite, first))
    for other in others:
        assert other == pytest.approx(first, rel=1e-5, abs=1e-9)


def test_no_total_depends_on_how_prompts_are_split_into_microbatches() -> None:
    """X includes all responses of a prompt, so it does not matter which come first."""
    cuts = [(4, 8, False, None), (4, 8, True, None), (32, 1, False, None), (1, 32, True, None)]
    first, *others = (totals(*cut, responses=G) for cut in cuts)
    for other in others:
        assert other == pytest.approx(first, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("size", "count", "shuffled"),
    [(4, 8, True), (32, 1, False), (16, 2, True), (1, 32, True)],
)
def test_prediction_and_error_do_not_depend_on_how_prompts_are_split_into_microbatches(
    size: int, count: int, shuffled: bool
) -> None:
    """Each fold is one prompt. Hooks catch its gradient if each microbatch is a prompt; otherwise it is recomputed."""
    caught, anew = measured_at(4, 8, False, None, G, False), measured_at(size, count, shuffled, None, G, False)
    for name in ("delta_h/forward", "delta_h/forward_sequence", "delta_h/part/momentum", "delta_h/backward"):
        assert math.isfinite(caught[name].stderr)
        expected = (caught[name].value, caught[name].stderr)
        assert (anew[name].value, anew[name].stderr) == pytest.approx(expected, rel=1e-4, abs=1e-9), name


def test_shuffled_prompts_get_whole_prompt_folds_with_the_estimates_of_the_plain_twin(
    make_trainer,
) -> None:
    """With TRL's shuffled rollout, the responses to a prompt are in several microbatches."""
    recorder, probe = Recorder(), Answers(num_folds=5, responses_per_prompt=3, per_sequence=True)
    trainer = make_trainer(
        GRPOTrainer, loss_type="dr_grpo", scale_rewards="none", beta=0.0, mask_truncated_completions=False,
        per_device_train_batch_size=G, gradient_accumulation_steps=8, learning_rate=3e-3, reward=graded,
        adam_epsilon=1e-5, max_grad_norm=0.05, dtype=torch.float64,
    )  # fmt: skip
    with attach(trainer, probes=[probe, recorder], whole_prompts=False):
        trainer.train()
    before, twin = (Twin(step, responses=3) for step in recorder.steps)
    prompts, folds = (twin.step.rollout.prompt_index.tolist(), twin.step.fold.tolist())
    assert len(set(prompts)) == len(set(zip(prompts, folds, strict=True))) == 8
    assert any(len(set(prompts[row : row + G])) > 1 for row in range(0, 32, G))
    for suffix, statistic in (("", per_token), ("_sequence", per_sequence)):
        for name, update in (("backward", before.update), ("reuse", twin.update)):
            expected = twin.change(update, statistic)
            assert probe.all[1][f"delta_h/{name}{suffix}"].value == pytest.approx(expected, rel=1e-3, abs=1e-9)
        expected = reference.jackknife_stderr(statistic, twin.rows(twin.products(before.update)))
        assert probe.all[1][f"delta_h/backward{suffix}"].stderr == pytest.approx(expected, rel=1e-3)
    assert probe.all[1]["delta_h/forward"].stderr > 0.0


@pytest.mark.parametrize("num_folds", [None, 2, 6, 7])
def test_no_fold_is_empty_where_processes_have_unequal_numbers_of_spread_prompts(
    num_folds: int | None,
) -> None:
    """There are as many folds as the process with fewer prompts can fill, or twice as many if each has one process."""
    prompts = (torch.tensor([4, 9, 6, 4]), torch.tensor([7, 1, 8, 1, 3, 5, 7]))  # three and five prompts
    placed_folds: list[list[int]] = [[], []]

    def placed(rank: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        ranks = Ranks(2, reduce, rank)
        folds, source = choose_folds(
            [], lambda: fewest_prompts(prompts[rank], ranks), 2, num_folds, plan_fails=True, can_recompute=False
        )
        placed_folds[rank] = fold_of_rows(folds, source, prompts[rank], rank).tolist()
        return torch.tensor(num_folds_in(folds))

    first, other = map(int, on_two_ranks(placed))
    assert first == other == {None: 6, 2: 2, 6: 6, 7: 6}[num_folds]
    numbers = [*range(first)]
    assert [sorted({*folds_of_rank}) for folds_of_rank in placed_folds] == (
        [numbers, numbers] if first <= 3 else [numbers[0::2], numbers[1::2]]
    )


CAUGHT, RECOMPUTED, MISSING = FoldSource
# By case: planned folds, prompts per rank, ranks, folds asked for, whether the plan fails, whether further passes may
# give gradients; and the folds chosen.
CHOICES: dict[str, tuple[int, int, int, int | None, bool, bool, tuple[int, FoldSource]]] = {
    "the plan has enough": (8, 8, 1, None, False, True, (8, CAUGHT)),
    "the plan has enough for an error bar": (4, 8, 1, None, False, True, (4, CAUGHT)),
    "the plan has too few for an error bar": (3, 8, 1, None, False, True, (8, RECOMPUTED)),
    "the plan has too few, further passes are ruled out": (3, 8, 1, None, False, False, (3, CAUGHT)),
    "prompts are too few for an error bar too": (2, 3, 1, None, False, True, (2, CAUGHT)),
    "prompts are too few by default, enough for the request": (2, 3, 1, 3, False, True, (3, RECOMPUTED)),
    "the plan has fewer than asked for": (4, 8, 1, 7, False, True, (7, RECOMPUTED)),
    "no more prompts than planned folds": (4, 4, 1, 8, False, True, (4, CAUGHT)),
    "two ranks have four prompts each": (2, 4, 2, None, False, True, (8, RECOMPUTED)),
    "the plan fails": (8, 8, 1, None, True, True, (8, RECOMPUTED)),
    "the plan fails, further passes are ruled out": (3, 8, 1, None, True, False, (8, MISSING)),
    "the plan fails, two folds are asked for": (8, 8, 1, 2, True, True, (2, RECOMPUTED)),
    "the plan fails, one fold is asked for": (8, 8, 1, 1, True, True, (1, MISSING)),
    "the plan fails, prompts are too few for an error bar": (1, 3, 1, None, True, True, (3, MISSING)),
}


@pytest.mark.parametrize("case", CHOICES)
def test_folds_are_of_microbatches_unless_these_fail_or_further_passes_give_more(case: str) -> None:
    num_planned, num_prompts, num_ranks, num_folds, plan_fails, can_recompute, expected = CHOICES[case]
    planned = plan_folds([1] * num_planned, 1) if num_ranks == 1 else plan_folds([1], 1, num_ranks)
    counts: list[int] = []  # of prompts, for which ranks wait

    def count_prompts() -> int:
        counts.append(num_prompts)
        return num_prompts

    folds, source = choose_folds(
        planned, count_prompts, num_ranks, num_folds, plan_fails=plan_fails, can_recompute=can_recompute
    )
    assert (num_folds_in(folds), source) == expected
    assert (folds is planned) == (source is CAUGHT)
    assert len(counts) == (plan_fails or (can_recompute and "the plan has enough" not in case))


def test_further_passes_need_a_probe_of_fold_gradients_and_a_loss_that_they_can_repeat() -> None:
    assert may_recompute(Need.ENTROPY_GRADIENT | Need.SQ_NORMS, Reasons(no_folds=MIXED_PROMPTS))
    assert not may_recompute(Need.SQ_NORMS | Need.TERMS_CHECK, Reasons())
    for reasons in (Reasons(split_prompts=SPLIT_PROMPTS), Reasons(other_terms=OTHER_TERMS)):
        assert not may_recompute(Need.ENTROPY_GRADIENT, reasons)

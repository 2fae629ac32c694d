"""Claims on folds of whole prompts: their plan, leaving one out, and the jackknife."""

import math
import random
import statistics
from collections.abc import Callable

import pytest
import reference
import torch
from example_steps import means_without_folds
from ranks_in_threads import on_two_ranks
from torch import Tensor

from rl_training.entropy.data import FORWARD, PRODUCTS, REUSE, FoldSums
from rl_training.entropy.fold_sums import sums_without
from rl_training.policy.rollout import response_index
from rl_training.statistics.jackknife import JackknifeUnits, jackknife_stderr, leave_out_coefficients
from rl_training.step.folds import (
    FoldGroup,
    folds_of_prompts,
    plan_folds,
    plan_prompt_folds,
    ranges_of,
)


def random_folds(num_folds: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(num_folds, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- which folds a step has -------------------------------------------------------------------------------------------

G = 8
# By batch per device and gradient accumulation (64 sequences per process): the folds of one process and of two.
LAYOUTS = {(8, 1): (1, 2), (4, 16): (8, 8), (16, 4): (4, 8), (2, 32): (8, 8), (64, 1): (1, 2)}


def check_plan(
    sizes: list[int], num_ranks: int, num_folds: int | None, of_ranks: list[list[int]] | None = None
) -> list[FoldGroup]:
    """Return a process's plan. Assert that each sequence is in exactly one fold, and each fold has whole prompts."""
    groups = plan_folds(sizes, G, num_ranks, num_folds, of_ranks)
    folds = [fold for group in groups for fold in group.folds]
    assert folds == list(range(len(folds)))
    passes = [rows for group in groups for rows in group.rows_per_pass]
    assert [row for rows in passes for row in rows] == list(range(sum(sizes)))
    microbatches = ranges_of(sizes)
    assert all(any(set(rows) <= set(microbatch) for microbatch in microbatches) for rows in passes)
    for group in groups:
        assert sum(map(len, group.rows_per_pass)) > 0
        assert sum(map(len, group.rows_per_pass)) % G == 0
        assert len(group.fold_of_rank) == num_ranks
        assert set(group.fold_of_rank) == set(range(len(group.folds)))  # each fold has a process
    return groups


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
def test_folds_are_whole_prompts_and_eight_where_that_needs_no_extra_pass(
    layout: tuple[int, int], num_ranks: int
) -> None:
    size, accumulation = layout
    groups = check_plan([size] * accumulation, num_ranks, None)
    assert groups[-1].folds.stop == LAYOUTS[layout][num_ranks - 1]
    passes = [rows for group in groups for rows in group.rows_per_pass]
    assert passes == list(ranges_of([size] * accumulation))  # the loop's own microbatches


def test_processes_are_grouped_into_the_fewest_folds_that_make_eight() -> None:
    """8 processes: each of 4 microbatches makes two folds of four processes, 1 makes eight folds, each of 8 one."""
    of_four, of_one, of_eight = (check_plan([G] * count, 8, None) for count in (4, 1, 8))
    assert [group.fold_of_rank for group in of_four] == [(0, 0, 0, 0, 1, 1, 1, 1)] * 4
    assert [group.fold_of_rank for group in of_one] == [tuple(range(8))]
    assert [group.fold_of_rank for group in of_eight] == [(0,) * 8] * 8


@pytest.mark.parametrize("count", [3, 5, 7, 9, 20])
@pytest.mark.parametrize("num_ranks", [1, 3, 5, 7, 13])
def test_there_are_8_to_15_folds_where_microbatches_are_enough(count: int, num_ranks: int) -> None:
    """Seven ranks with seven microbatches each make 14 folds of three or four microbatches, not 49."""
    num_folds = check_plan([G] * count, num_ranks, None)[-1].folds.stop
    assert 8 <= num_folds <= 15 or num_folds == count * num_ranks < 8


def test_with_enough_processes_a_fold_is_what_some_of_them_have_in_the_whole_step() -> None:
    """Whatever their number, if 8 to 15 groups of them are possible, or as many groups as folds are requested."""
    sizes = [4, 12, 8]  # no microbatch but the last ends with a prompt
    for num_ranks, num_folds, expected in ((8, None, 8), (12, None, 12), (64, None, 8), (8, 4, 4), (2, 2, 2)):
        (group,) = plan_folds(sizes, G, num_ranks, num_folds, by_rank=True)
        assert group.folds == range(expected)
        assert group.fold_of_rank == tuple(rank * expected // num_ranks for rank in range(num_ranks))
        assert group.rows_per_pass == ranges_of(sizes)
    for num_ranks, num_folds in ((4, None), (17, None), (8, 3), (8, 1)):
        sizes = [G] * 8
        plans = [plan_folds(sizes, G, num_ranks, num_folds, by_rank=by_rank) for by_rank in (False, True)]
        assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("layout", "num_ranks", "num_folds"),
    [
        ((64, 1), 2, 2),
        ((16, 4), 1, 3),
        ((16, 4), 2, 6),  # three of each process
        ((16, 4), 2, 8),
        ((16, 4), 2, 3),
        ((2, 32), 2, 16),
        ((2, 32), 2, 5),
    ],
)
def test_there_are_as_many_folds_as_requested(layout: tuple[int, int], num_ranks: int, num_folds: int) -> None:
    size, accumulation = layout
    assert check_plan([size] * accumulation, num_ranks, num_folds)[-1].folds.stop == num_folds


@pytest.mark.parametrize(
    ("layout", "num_ranks", "num_folds", "fitting"),
    [((64, 1), 1, 3, 1), ((64, 1), 2, 9, 2), ((16, 4), 1, 6, 4), ((16, 4), 2, 5, 4), ((2, 32), 1, 9, 8)],
)
def test_more_folds_than_the_microbatches_can_give_are_lowered_to_what_they_can(
    layout: tuple[int, int], num_ranks: int, num_folds: int, fitting: int
) -> None:
    size, accumulation = layout
    assert check_plan([size] * accumulation, num_ranks, num_folds)[-1].folds.stop == fitting


@pytest.mark.parametrize("num_folds", [None, 2, 4, 8])
def test_processes_with_unequal_microbatches_of_whole_prompts_have_equal_fold_groups(num_folds: int | None) -> None:
    of_ranks = [[8, 24, 40, 8], [16, 16, 32, 32]]
    check_same_groups([check_plan(sizes, 2, num_folds, of_ranks) for sizes in of_ranks])


def test_a_unit_of_folds_ends_where_a_prompt_ends_on_every_process() -> None:
    """On the third process every microbatch ends with a prompt; on the others every second one, elsewhere."""
    of_ranks = [[12, 12, 8, 8], [8, 12, 4, 8], [8, 8, 8, 8]]
    plans = [check_plan(sizes, 3, None, of_ranks) for sizes in of_ranks]
    check_same_groups(plans)
    assert [group.rows_per_pass[-1].stop for group in plans[1]] == [24, 32]
    assert check_plan(of_ranks[2], 3, 12, of_ranks)[-1].folds.stop == 6  # two stretches on each of three processes


def check_same_groups(plans: list[list[FoldGroup]]) -> None:
    first, *rest = (
        [(group.folds, group.fold_of_rank, len(group.rows_per_pass)) for group in groups] for groups in plans
    )
    assert all(plan == first for plan in rest)


# --- leaving one out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[8, 8], [4, 4, 4, 4, 4], [8, 16, 1, 3]], ids=str)
def test_leaving_out_a_fold_gives_the_plain_mean_of_the_others(sizes: list[int]) -> None:
    folds = random_folds(len(sizes), 2, 3)
    flat = folds.view(len(sizes), -1).tolist()
    got = means_without_folds(folds, torch.tensor(sizes).double())
    expected = [reference.mean_of_the_others(flat, sizes, k) for k in range(len(sizes))]
    assert got.shape == folds.shape
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64).view_as(folds), rtol=0, atol=1e-13)


@pytest.mark.parametrize("sizes", [[8], [0, 8]])
def test_leaving_out_the_only_fold_raises(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="fold"):
        leave_out_coefficients(torch.tensor(sizes))


# --- the jackknife ----------------------------------------------------------------------------------------------------


def mean_of(sums: Tensor) -> Tensor:
    return sums[..., :1] / sums[..., 1:2]


def ratio_and_product(sums: Tensor) -> Tensor:
    """Return two smooth statistics of three sums: (..., 3) to (..., 2)."""
    return torch.stack([sums[..., 0] / sums[..., 1], sums[..., 0] * sums[..., 2] / sums[..., 1].square()], dim=-1)


def fold_sums(num_folds: int, seed: int) -> Tensor:
    """Return (num_folds, 3) sums over folds whose second column, the denominator, is far from 0."""
    return random_folds(num_folds, 3, seed=seed) + torch.tensor([0.5, 9.0, 2.0], dtype=torch.float64)


def textbook(by_fold: Tensor) -> list[float]:
    rows = by_fold.tolist()
    return [
        reference.jackknife_stderr(lambda s: s[0] / s[1], rows),
        reference.jackknife_stderr(lambda s: s[0] * s[2] / s[1] ** 2, rows),
    ]


@pytest.mark.parametrize("num_folds", [2, 3, 8, 16])
def test_the_jackknife_error_of_a_ratio_is_the_textbook_one(num_folds: int) -> None:
    by_fold = fold_sums(num_folds, seed=num_folds)
    sums = by_fold.sum(dim=0)
    got = jackknife_stderr(ratio_and_product, sums, sums - by_fold)
    assert got.tolist() == pytest.approx(textbook(by_fold), rel=1e-11)


def test_the_jackknife_error_of_equal_folds_is_zero_and_not_nan() -> None:
    by_fold = torch.tensor([[0.1, 0.3, 0.7]] * 9, dtype=torch.float64)
    sums = by_fold.sum(dim=0)
    got = jackknife_stderr(ratio_and_product, sums, sums - by_fold)
    assert (got < 1e-15).all()


def test_the_jackknife_error_does_not_lose_digits_to_a_large_mean() -> None:
    values = [1e8 + x for x in (0.25, -0.5, 1.0, 0.125, -1.5, 0.75, 2.0, -0.25)]
    by_fold = torch.tensor([[x, 1.0] for x in values], dtype=torch.float64)
    sums = by_fold.sum(dim=0)
    expected = statistics.stdev(x - 1e8 for x in values) / math.sqrt(8)
    assert float(jackknife_stderr(mean_of, sums, sums - by_fold)) == pytest.approx(expected, rel=1e-6)


def test_nan_in_a_fold_makes_the_error_nan() -> None:
    by_fold = fold_sums(8, seed=6)
    by_fold[3, 2] = math.nan
    sums = by_fold.sum(dim=0)
    got = jackknife_stderr(ratio_and_product, sums, sums - by_fold)
    assert got.isnan().tolist() == [False, True]


def test_leave_one_out_sums_use_the_entropy_level_of_the_other_folds() -> None:
    # For two folds: (sequences, ΣH, ΣT), and X_seq · δθ, X_len · δθ with and without the other fold in the step.
    levels = torch.tensor([[1.0, 2.0, 4.0], [1.0, 1.0, 6.0]], dtype=torch.float64)  # H_tok = 0.3; folds: 0.5 and 1/6
    of_sequence, of_length = (torch.tensor(x, dtype=torch.float64) for x in ([3.0, 5.0], [2.0, 1.0]))
    lost_sequence, lost_length = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, -1.0], [0.2, 0.4]))

    def pairs(sequence: Tensor, length: Tensor) -> Tensor:  # per token at the level of both folds, and per sequence
        return torch.stack([sequence - 0.3 * length, sequence], dim=-1)

    products = pairs(of_sequence, of_length).unsqueeze(1).repeat(1, len(PRODUCTS), 1)
    terms = FoldSums.of(levels, products, reward=of_sequence)
    total = FoldSums(terms.table.sum(dim=0))
    lost = torch.zeros_like(products)
    # Indexed by the fold that is left out, so each row holds the other fold's loss.
    lost[:, FORWARD] = pairs(lost_sequence, lost_length).flip(0)
    corrections = FoldSums.of(torch.zeros_like(levels), lost, reward=lost_length.flip(0))
    sums = sums_without(total, terms, corrections, level=0.3)
    without = sums.products
    # Without fold 0: fold 1 at its own level, with a step that lost fold 0: 5 − 1 − (1 + 0.4)/6. And vice versa.
    expected = torch.tensor([[4.0 - 1.4 / 6, 4.0], [3.5 - 0.5 * 2.2, 3.5]], dtype=torch.float64)
    torch.testing.assert_close(without[:, FORWARD], expected)
    # The step of `reuse` loses nothing.
    torch.testing.assert_close(without[:, REUSE], expected.new_tensor([[5 - 1 / 6, 5.0], [3 - 0.5 * 2, 3.0]]))
    torch.testing.assert_close(sums.reward, expected.new_tensor([5 + 0.4, 3 + 0.2]))
    as_given = sums_without(total, terms, corrections, level=None).products
    torch.testing.assert_close(
        as_given[:, FORWARD], expected.new_tensor([[4 - 0.3 * 1.4, 4.0], [3.5 - 0.3 * 2.2, 3.5]])
    )


def test_the_maximum_of_a_column_covers_all_ranks() -> None:
    rows = [torch.tensor([[-5.0, 1.0], [-3.0, 0.0]]), torch.tensor([[-4.0, 7.0], [-9.0, 2.0]])]

    def largest(rank: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        return JackknifeUnits(torch.tensor([0, 1]) + 2 * rank, 4, reduce).max(rows[rank].double())

    assert [maximum.tolist() for maximum in on_two_ranks(largest)] == [[-3.0, 7.0]] * 2


# --- prompts and folds ------------------------------------------------------------------------------------------------


def interleaved_prompts(num_prompts: int, seed: int) -> list[int]:
    """Return prompt labels for 1 to 4 responses per prompt in random order. Labels are neither small nor sorted."""
    rng = random.Random(seed)
    labels = [label for label in rng.sample(range(1000), num_prompts) for _ in range(rng.randint(1, 4))]
    rng.shuffle(labels)
    return labels


@pytest.mark.parametrize("seed", range(3))
def test_the_response_index_counts_earlier_responses_to_the_same_prompt(seed: int) -> None:
    labels = interleaved_prompts(7, seed)
    assert response_index(torch.tensor(labels)).tolist() == [labels[:i].count(x) for i, x in enumerate(labels)]


@pytest.mark.parametrize("num_folds", [None, 1, 2, 3, 5, 8, 9, 20, 64])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("num_prompts", [1, 5, 8, 17])
def test_folds_of_spread_prompts_keep_prompts_whole_and_are_balanced_over_processes(
    num_prompts: int, ranks: int, num_folds: int | None
) -> None:
    """The plan uses the smallest number of prompts on any process; other processes may have more."""
    groups = plan_prompt_folds(num_prompts, ranks, num_folds)
    count = groups[-1].folds.stop
    if num_folds is None:
        assert count >= min(8, num_prompts * ranks)
    else:
        assert min(num_prompts, num_folds) <= count <= num_folds
    ranks_of_fold: dict[int, int] = dict.fromkeys(range(count), 0)
    for rank in range(ranks):
        labels = interleaved_prompts(num_prompts + rank, seed=rank)
        folds = folds_of_prompts(torch.tensor(labels), groups, rank).tolist()
        where = {label: {f for f, x in zip(folds, labels, strict=True) if x == label} for label in labels}
        assert all(len(folds_of_label) == 1 for folds_of_label in where.values())
        prompts_in_fold = [sum({f} == folds_of_label for folds_of_label in where.values()) for f in set(folds)]
        assert max(prompts_in_fold) - min(prompts_in_fold) <= 1
        for fold in set(folds):
            ranks_of_fold[fold] += 1
    assert len(set(ranks_of_fold.values())) == 1  # no fold is empty, and all are on equally many processes

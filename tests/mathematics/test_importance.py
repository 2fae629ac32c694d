"""The change of entropy by importance sampling: by enumeration, by hand, and against the plain definition."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest
import reference
import torch
from torch import Tensor

from rl_training.mathematics.importance import (
    change_of_sums,
    change_terms,
    importance_weights,
    paired_replicates,
    reweighted_replicates,
    sequence_totals,
)
from rl_training.mathematics.jackknife import Replicates
from rl_training.mathematics.scores import Scores


class Change(NamedTuple):
    token: float
    sequence: float
    token_stderr: float
    sequence_stderr: float


def change_of(replicates: Replicates) -> Change:
    return Change(*replicates.value.tolist(), *replicates.stderr.tolist())


def table(seed: int) -> list[list[float]]:
    rng = random.Random(seed)
    return [[rng.gauss(0, 1) for _ in range(3)] for _ in reference.PREFIXES]


def step_from(logits: list[list[float]], size: float) -> list[list[float]]:
    rng = random.Random(99)
    return [[x + size * rng.gauss(0, 1) for x in row] for row in logits]


def totals_of(logits: list[list[float]], responses: list[tuple[int, ...]]) -> Tensor:
    """Returns (N, 3): S, H and T of each response under a tabular policy."""
    rows = []
    for response in responses:
        entropy = 0.0
        for prefix in reference.prefix_numbers(response):
            logps = reference.log_softmax(logits[prefix])
            entropy -= sum(math.exp(x) * x for x in logps)
        rows.append([reference.sequence_logp(logits, response), entropy, len(response)])
    return torch.tensor(rows, dtype=torch.float64)


def draws(logits: list[list[float]], count: int, seed: int) -> list[tuple[int, ...]]:
    chances = [math.exp(reference.sequence_logp(logits, response)) for response in reference.RESPONSES]
    return random.Random(seed).choices(reference.RESPONSES, chances, k=count)


def plain_change(before: list[list[float]], after: list[list[float]]) -> tuple[float, float, float]:
    """Returns ΔH per token, ΔH per sequence and ESS by self-normalised importance sampling, term by term."""
    weights = [math.exp(b[0] - a[0]) for a, b in zip(before, after, strict=True)]
    new = sum(w * b[1] for w, b in zip(weights, after, strict=True))
    old = sum(a[1] for a in before)
    token = new / sum(w * b[2] for w, b in zip(weights, after, strict=True)) - old / sum(a[2] for a in before)
    sequence = new / sum(weights) - old / len(before)
    return token, sequence, sum(weights) ** 2 / sum(w * w for w in weights)


def plain_jackknife(before: list[list[float]], after: list[list[float]]) -> list[float]:
    """Returns the delete-one errors of ΔH per token and per sequence, each left-out set computed from scratch."""
    count = len(before)
    left_out = [plain_change(before[:i] + before[i + 1 :], after[:i] + after[i + 1 :])[:2] for i in range(count)]
    errors = []
    for values in zip(*left_out, strict=True):
        mean = sum(values) / count
        errors.append(math.sqrt((count - 1) / count * sum((x - mean) ** 2 for x in values)))
    return errors


@pytest.mark.parametrize("size", [0.01, 0.3, 3.0])
def test_over_the_whole_population_the_reweighted_change_is_the_exact_change(size: float) -> None:
    old = table(0)
    new = step_from(old, size)
    before, after = totals_of(old, reference.RESPONSES), totals_of(new, reference.RESPONSES)
    chances = before[:, :1].exp()
    weights = (after[:, 0] - before[:, 0]).exp()
    token, sequence = change_of_sums((chances * change_terms(before, after, weights)).sum(dim=0)).tolist()
    was, now = reference.exact(old), reference.exact(new)
    assert sequence == pytest.approx(now.entropy - was.entropy, abs=1e-9)
    assert token == pytest.approx(now.entropy / now.length - was.entropy / was.length, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_reweighted_change_its_errors_and_the_ess_are_those_of_the_plain_definition(seed: int) -> None:
    old = table(seed)
    responses = draws(old, 20, seed)
    before, after = totals_of(old, responses), totals_of(step_from(old, 0.5), responses)
    token, sequence, ess = plain_change(before.tolist(), after.tolist())
    got = change_of(reweighted_replicates(before, after))
    assert (got.token, got.sequence) == pytest.approx((token, sequence), abs=1e-12)
    assert [got.token_stderr, got.sequence_stderr] == pytest.approx(
        plain_jackknife(before.tolist(), after.tolist()), rel=1e-9
    )
    assert importance_weights(before, after).ess == pytest.approx(ess, rel=1e-12)


def test_two_sequences_by_hand() -> None:
    before = torch.tensor([[-1.0, 1.0, 1.0], [-1.0, 1.0, 1.0]], dtype=torch.float64)
    after = torch.tensor([[-1.0 + math.log(3), 2.0, 1.0], [-1.0, 4.0, 1.0]], dtype=torch.float64)
    got, weights = change_of(reweighted_replicates(before, after)), importance_weights(before, after)
    assert (got.token, got.sequence) == pytest.approx((1.5, 1.5))
    assert got.sequence_stderr == pytest.approx(1.0)  # left-out values 3 and 1: ½ Σ (±1)²
    assert (weights.ess, weights.largest, weights.smallest) == pytest.approx((16 / 10, 3.0, 1.0))


def test_a_policy_that_did_not_move_has_no_change_and_equal_weights() -> None:
    totals = totals_of(table(1), draws(table(1), 50, 1))
    got, weights = change_of(reweighted_replicates(totals, totals)), importance_weights(totals, totals)
    assert (got.token, got.sequence) == (0, 0)
    assert max(got.token_stderr, got.sequence_stderr) < 1e-15
    assert (weights.ess, weights.largest, weights.smallest) == (50, 1, 1)


@pytest.mark.parametrize("shift", [-2000.0, 3.0, 2000.0])
def test_weights_matter_only_relative_to_one_another_and_never_overflow(shift: float) -> None:
    old = table(2)
    before = totals_of(old, draws(old, 30, 2))
    after = totals_of(step_from(old, 0.5), draws(old, 30, 2))
    shifted = after + torch.tensor([shift, 0, 0])
    here, there = change_of(reweighted_replicates(before, after)), change_of(reweighted_replicates(before, shifted))
    assert (there.token, there.sequence) == pytest.approx((here.token, here.sequence), abs=1e-10)
    assert there.sequence_stderr == pytest.approx(here.sequence_stderr, rel=1e-9)
    assert importance_weights(before, shifted).ess == pytest.approx(importance_weights(before, after).ess, rel=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_is_not_finite_makes_the_change_or_its_ess_nan(bad: float) -> None:
    before = totals_of(table(3), draws(table(3), 9, 3))
    after = before.clone()
    after[4, 0] = bad
    if bad == -math.inf:  # a sequence that has become impossible: weight 0
        assert importance_weights(before, after).ess == pytest.approx(8)
        assert importance_weights(before, after).smallest == 0
    else:
        assert math.isnan(importance_weights(before, after).ess)
        assert math.isnan(change_of(reweighted_replicates(before, after)).sequence)


def test_paired_change_is_the_mean_difference_with_the_error_of_pairs() -> None:
    old, new = table(4), step_from(table(4), 0.5)
    before, after = totals_of(old, draws(old, 40, 4)), totals_of(new, draws(new, 40, 5))
    got = change_of(paired_replicates(before, after))
    differences = (after - before)[:, 1]
    assert got.sequence == pytest.approx(float(differences.mean()), abs=1e-13)
    assert got.sequence_stderr == pytest.approx(float(differences.std() / math.sqrt(40)), rel=1e-9)
    per_token = after[:, 1].sum() / after[:, 2].sum() - before[:, 1].sum() / before[:, 2].sum()
    assert got.token == pytest.approx(float(per_token), abs=1e-13)


def test_the_standard_error_is_the_scatter_of_repeated_samples_around_the_exact_change() -> None:
    old = table(6)
    new = step_from(old, 0.3)
    before, after = totals_of(old, reference.RESPONSES), totals_of(new, reference.RESPONSES)
    rows = torch.multinomial(before[:, 0].exp(), 400 * 100, True, generator=torch.Generator().manual_seed(0))
    changes = [change_of(reweighted_replicates(before[r], after[r])) for r in rows.view(400, 100)]
    was, now = reference.exact(old), reference.exact(new)
    for name, exact in (
        ("sequence", now.entropy - was.entropy),
        ("token", now.entropy / now.length - was.entropy / was.length),
    ):
        values = torch.tensor([getattr(change, name) for change in changes])
        claimed = torch.tensor([getattr(change, f"{name}_stderr") for change in changes])
        assert float(values.std()) == pytest.approx(float(claimed.square().mean().sqrt()), rel=0.15)  # ±4 of its errors
        assert abs(float(values.mean()) - exact) < 4 * float(values.std()) / math.sqrt(400)


def test_totals_count_sampled_tokens_only() -> None:
    scores = Scores(
        logps=torch.tensor([[-1.0, -2.0, math.nan], [-4.0, 7.0, 7.0]]),
        entropies=torch.tensor([[0.5, 0.25, math.inf], [1.0, 9.0, 9.0]]),
        mask=torch.tensor([[1, 1, 0], [1, 0, 0]]),
    )
    totals = sequence_totals(scores)
    assert totals.dtype == torch.float64
    assert totals.tolist() == [[-3.0, 0.75, 2.0], [-4.0, 1.0, 1.0]]


def test_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        change_of(reweighted_replicates(torch.zeros(1, 3), torch.zeros(1, 3)))

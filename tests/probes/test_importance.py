"""Entropy change by importance sampling, and its first order: enumerated, by hand, and from the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import reference
import torch
from table_policies import DIRECTION, EIGHTHS, OLD, Response, Table, as_scores, draws, moved, ragged_scores
from torch import Tensor

from rl_training.entropy.per_decision import first_order_change, per_decision_change, slopes
from rl_training.entropy.weights import surrogate_weights
from rl_training.policy.scores import Scores
from rl_training.probes.importance import importance_weights, paired_replicates, reweighted_replicates, sequence_totals
from rl_training.statistics.jackknife import JackknifeUnits, Replicates


def population() -> list[Response]:
    """Return 512 responses in exact proportion to their probabilities under OLD."""
    responses = []
    for response in reference.RESPONSES:
        rows = reference.prefix_numbers(response)
        chance = math.prod(Fraction(EIGHTHS[row][token], 8) for row, token in zip(rows, response, strict=True))
        assert (512 * chance).denominator == 1
        responses += [response] * int(512 * chance)
    return responses


def exact_change(new: Table) -> list[float]:
    was, now = reference.exact(OLD), reference.exact(new)
    return [now.entropy / now.length - was.entropy / was.length, now.entropy - was.entropy]


# --- two estimators, from Scores before and after, and their plain twins: ΔH per token and per sequence ---------------


def whole_sequences(before: Scores, after: Scores, units: JackknifeUnits | None = None) -> Replicates:
    return reweighted_replicates(sequence_totals(before), sequence_totals(after), units)


def plain_whole_sequences(new: Table, responses: list[Response]) -> list[float]:
    (old_logps, old_h), (new_logps, new_h) = ragged_scores(OLD, responses), ragged_scores(new, responses)
    weights = [math.exp(sum(b) - sum(a)) for a, b in zip(old_logps, new_logps, strict=True)]
    entropy = sum(w * sum(h) for w, h in zip(weights, new_h, strict=True))
    length = sum(w * len(h) for w, h in zip(weights, new_h, strict=True))
    before, tokens = sum(map(sum, old_h)), sum(map(len, old_h))
    return [entropy / length - before / tokens, entropy / sum(weights) - before / len(responses)]


def plain_per_decision(new: Table, responses: list[Response]) -> list[float]:
    (old_logps, old_h), (new_logps, new_h) = ragged_scores(OLD, responses), ragged_scores(new, responses)
    entropy = length = 0.0
    for k in range(reference.MAX_LENGTH):
        ratios = [math.exp(sum(b[:k]) - sum(a[:k])) for a, b in zip(old_logps, new_logps, strict=True)]
        alive = [i for i, response in enumerate(responses) if k < len(response)]
        entropy += sum(ratios[i] * new_h[i][k] for i in alive) / sum(ratios)
        length += sum(ratios[i] for i in alive) / sum(ratios)
    before, tokens = sum(map(sum, old_h)), sum(map(len, old_h))
    return [entropy / length - before / tokens, entropy - before / len(responses)]


Estimator = Callable[..., Replicates]
Plain = Callable[[Table, list[Response]], list[float]]
BOTH = {
    "whole sequences": (whole_sequences, plain_whole_sequences),
    "decisions": (per_decision_change, plain_per_decision),
}
every_estimator = pytest.mark.parametrize(("estimator", "plain"), BOTH.values(), ids=BOTH)


def each_left_out(responses: list[Response], size: int) -> list[list[Response]]:
    """Return, for each prompt, all responses except its own. Each prompt has `size` consecutive responses."""
    return [responses[:i] + responses[i + size :] for i in range(0, len(responses), size)]


@every_estimator
@pytest.mark.parametrize("size", [0.01, 0.3, 3.0])
def test_over_the_whole_population_the_estimate_is_the_exact_change(
    estimator: Estimator, plain: Plain, size: float
) -> None:
    new = moved(OLD, size)
    got = estimator(as_scores(OLD, population()), as_scores(new, population()))
    assert got.value.tolist() == pytest.approx(exact_change(new), abs=1e-9)


@every_estimator
@pytest.mark.parametrize("size", [1, 3], ids=["one to a prompt", "three to a prompt"])
@pytest.mark.parametrize("seed", range(3))
def test_values_with_and_without_each_sequence_equal_the_plain_definition(
    estimator: Estimator, plain: Plain, seed: int, size: int
) -> None:
    new, responses = moved(OLD, 0.5), draws(12, seed)
    before, after = as_scores(OLD, responses), as_scores(new, responses)
    got = estimator(before, after, JackknifeUnits.of_rows(before.mask).in_blocks(size))
    assert got.value.tolist() == pytest.approx(plain(new, responses), abs=1e-12)
    for row, rest in zip(got.without.tolist(), each_left_out(responses, size), strict=True):
        assert row == pytest.approx(plain(new, rest), abs=1e-12)


@every_estimator
@pytest.mark.parametrize("shift", [-2000.0, 2000.0])
def test_only_the_relative_size_of_ratios_matters_and_they_never_overflow(
    estimator: Estimator, plain: Plain, shift: float
) -> None:
    before, after = as_scores(OLD, draws(30, 1)), as_scores(moved(OLD, 0.5), draws(30, 1))
    shifted = Scores(after.logps + torch.tensor([shift, 0, 0]), after.entropies, after.mask)
    here, there = estimator(before, after), estimator(before, shifted)
    assert torch.allclose(there.value, here.value)
    assert torch.allclose(there.stderr, here.stderr)
    sizes = [importance_weights(sequence_totals(before), sequence_totals(scores)).ess for scores in (after, shifted)]
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-9)


@every_estimator
def test_the_standard_error_matches_the_scatter_of_repeated_samples(estimator: Estimator, plain: Plain) -> None:
    new, number, size = moved(OLD, 0.3), 300, 40
    rows = [draws(size, 1000 + i) for i in range(number)]
    changes = [estimator(as_scores(OLD, r), as_scores(new, r)) for r in rows]
    values, claimed = torch.stack([c.value for c in changes]), torch.stack([c.stderr for c in changes])
    assert torch.allclose(values.std(dim=0), claimed.square().mean(dim=0).sqrt(), rtol=0.17)  # 4 standard errors of std
    off = (values.mean(dim=0) - torch.tensor(exact_change(new))).abs()
    assert (off < 4 * values.std(dim=0) / math.sqrt(number)).all()


@every_estimator
def test_one_sequence_is_refused(estimator: Estimator, plain: Plain) -> None:
    single = as_scores(OLD, [(2,)])
    with pytest.raises(ValueError, match=r"\b2\b"):
        estimator(single, single)


# --- whole sequences --------------------------------------------------------------------------------------------------


def test_two_weighted_sequences_give_the_change_by_hand() -> None:
    before = torch.tensor([[-1.0, 1.0, 1.0], [-1.0, 1.0, 1.0]], dtype=torch.float64)
    after = torch.tensor([[-1.0 + math.log(3), 2.0, 1.0], [-1.0, 4.0, 1.0]], dtype=torch.float64)
    got, weights = reweighted_replicates(before, after), importance_weights(before, after)
    assert got.value.tolist() == pytest.approx([1.5, 1.5])
    assert float(got.stderr[1]) == pytest.approx(1.0)  # left-out values 3 and 1: ½ Σ (±1)²
    assert (weights.ess, weights.largest, weights.smallest) == pytest.approx((16 / 10, 3.0, 1.0))
    same = importance_weights(before, before)
    assert (same.ess, same.largest, same.smallest) == (2, 1, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_log_probability_makes_the_change_or_its_ess_nan(bad: float) -> None:
    before = sequence_totals(as_scores(OLD, draws(9, 3)))
    after = before.clone()
    after[4, 0] = bad
    weights = importance_weights(before, after)
    if bad == -math.inf:  # the sequence became impossible: weight 0
        assert (weights.ess, weights.smallest) == (pytest.approx(8), 0)
    else:
        assert math.isnan(weights.ess)
        assert reweighted_replicates(before, after).value.isnan().all()


def test_paired_change_is_the_mean_difference_with_the_error_of_pairs() -> None:
    new = moved(OLD, 0.5)
    before, after = (sequence_totals(as_scores(table, draws(40, seed))) for table, seed in ((OLD, 4), (new, 5)))
    got, differences = paired_replicates(before, after), (after - before)[:, 1]
    per_token = after[:, 1].sum() / after[:, 2].sum() - before[:, 1].sum() / before[:, 2].sum()
    assert got.value.tolist() == pytest.approx([float(per_token), float(differences.mean())], abs=1e-13)
    assert float(got.stderr[1]) == pytest.approx(float(differences.std() / math.sqrt(40)), rel=1e-9)
    copies = [totals.repeat_interleave(8, dim=0) for totals in (before, after)]
    again = paired_replicates(*copies, JackknifeUnits.of_rows(copies[0]).in_blocks(8))
    assert again.stderr.tolist() == pytest.approx(got.stderr.tolist(), rel=1e-9)


def test_sequence_totals_include_sampled_tokens_only() -> None:
    scores = Scores(
        logps=torch.tensor([[-1.0, -2.0, math.nan], [-4.0, 7.0, 7.0]]),
        entropies=torch.tensor([[0.5, 0.25, math.inf], [1.0, 9.0, 9.0]]),
        mask=torch.tensor([[1, 1, 0], [1, 0, 0]]),
    )
    totals = sequence_totals(scores)
    assert totals.dtype == torch.float64
    assert totals.tolist() == [[-3.0, 0.75, 2.0], [-4.0, 1.0, 1.0]]


# --- decision by decision ---------------------------------------------------------------------------------------------


def test_leaving_out_the_longest_sequence_equals_the_estimate_from_the_others() -> None:
    responses = [(0, 0, 2), (2,), (2,), (1, 2)]
    got = per_decision_change(as_scores(OLD, responses), as_scores(moved(OLD, 0.5), responses))
    assert got.without[0].tolist() == pytest.approx(plain_per_decision(moved(OLD, 0.5), responses[1:]), abs=1e-12)


# --- the first order on the same sequences ----------------------------------------------------------------------------


def exact_derivative() -> list[float]:
    """Return ∂H_tok and ∂H_seq along DIRECTION."""
    now = reference.exact(OLD)
    entropy, length = (
        sum(x * d for row, along in zip(table, DIRECTION, strict=True) for x, d in zip(row, along, strict=True))
        for table in (now.d_entropy, now.d_length)
    )
    return [(entropy - now.entropy / now.length * length) / now.length, entropy]


def finite_slopes(responses: list[Response], size: float = 1e-4) -> tuple[Tensor, Tensor]:
    return slopes(as_scores(moved(OLD, size), responses), as_scores(moved(OLD, -size), responses), size)


def test_over_the_whole_population_the_first_order_change_is_the_exact_derivative() -> None:
    """The sample is so large that a leave-one-out baseline hardly matters: with n alive its factor is n / (n − 1)."""
    responses = [response for response in population() for _ in range(8)]
    got = first_order_change(as_scores(OLD, responses), *finite_slopes(responses))
    assert got.value.tolist() == pytest.approx(exact_derivative(), rel=3e-3)


@pytest.mark.parametrize("size", [1, 3], ids=["one to a prompt", "three to a prompt"])
@pytest.mark.parametrize("seed", range(3))
def test_the_first_order_change_uses_the_surrogate_weights_with_the_buffer_baseline(seed: int, size: int) -> None:
    responses = draws(12, seed)

    def by_weights(rows: list[Response]) -> list[float]:
        scores, (of_logp, of_entropy) = as_scores(OLD, rows), finite_slopes(rows)
        known, change = (scores.entropies, scores.mask), []
        for target in ("token", "sequence"):
            w, u = surrogate_weights(*known, torch.arange(len(rows)), target=target, baseline="buffer")
            change.append(float((w * of_logp.nan_to_num() + u * of_entropy.nan_to_num()).sum() / len(rows)))
        return change

    scores = as_scores(OLD, responses)
    got = first_order_change(scores, *finite_slopes(responses), JackknifeUnits.of_rows(scores.mask).in_blocks(size))
    assert got.value.tolist() == pytest.approx(by_weights(responses), abs=1e-12)
    for row, rest in zip(got.without.tolist(), each_left_out(responses, size), strict=True):
        assert row == pytest.approx(by_weights(rest), abs=1e-12)


def test_positions_that_only_one_sequence_reaches_have_no_baseline() -> None:
    """In the value this concerns its positions 3 to 5. Without it, the same holds for the next longest sequence."""
    lengths = torch.tensor([6, 3, 2, 2])
    table = torch.rand(4, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.arange(6) < lengths.unsqueeze(1)

    def by_weights(rows: list[int]) -> list[float]:
        _, entropies, of_logp, of_entropy = table[:, rows]
        change = []
        for target in ("token", "sequence"):
            known = (entropies, mask[rows], torch.arange(len(rows)))
            w, u = surrogate_weights(*known, target=target, baseline="buffer")
            change.append(float((w * of_logp + u * of_entropy).sum() / len(rows)))
        return change

    got = first_order_change(Scores(table[0], table[1], mask), table[2], table[3])
    assert got.value.tolist() == pytest.approx(by_weights([0, 1, 2, 3]), rel=1e-12)
    for i, row in enumerate(got.without.tolist()):
        assert row == pytest.approx(by_weights([j for j in range(4) if j != i]), rel=1e-12)


def test_the_change_of_a_small_step_has_the_noise_of_the_first_order_on_the_same_sequences() -> None:
    responses, size = draws(300, 5), 1e-5
    before = as_scores(OLD, responses)
    new, old = as_scores(moved(OLD, size), responses), as_scores(moved(OLD, -size), responses)
    odd = (per_decision_change(before, new) - per_decision_change(before, old)) * (0.5 / size)
    first_order = first_order_change(before, *finite_slopes(responses))
    noise = first_order.stderr
    assert ((odd - first_order).value.abs() < 0.05 * noise).all()
    assert ((odd - first_order).stderr < 0.1 * noise).all()
    whole = whole_sequences(before, new) * (1 / size)
    assert (whole - first_order).stderr[1] > 0.5 * noise[1]  # per sequence: another estimator


# --- replicates -------------------------------------------------------------------------------------------------------


def test_the_error_of_a_mean_is_the_textbook_one_and_shared_noise_cancels_in_differences() -> None:
    x, y = torch.randn(2, 50, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def mean(values: Tensor) -> Replicates:
        return Replicates(values.mean(dim=0), (values.sum(dim=0) - values) / (len(values) - 1))

    assert float(mean(x).stderr) == pytest.approx(float(x.std()) / math.sqrt(50), rel=1e-12)
    assert float((mean(x + y) - mean(x)).stderr) == pytest.approx(float(mean(y).stderr), rel=1e-12)
    assert float((mean(x) + mean(x) * -1.0).stderr) == pytest.approx(0.0, abs=1e-15)

"""Claims on the running sum of trapezoids: its value, its error, and how it bridges gaps."""

import math

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from rl_training.entropy.data import Quantity
from rl_training.parallel.state_tensors import from_tensors, to_tensors
from rl_training.probes.trapezoid import TrapezoidSum, TrapezoidTerms

SHAPE = (2, 3)  # arbitrary: everything is elementwise
EMPTY = TrapezoidSum.empty(*SHAPE)
NUM_BATCHES = 6


def tensor(values: list[float]) -> Tensor:
    """Return the values as a tensor of SHAPE."""
    return torch.tensor(values, dtype=torch.float64).view(SHAPE)


def quantity(value: Tensor, stderr: Tensor, batches: Tensor) -> Quantity:
    return Quantity("", value, stderr, 1, batches=batches)


def test_an_error_bar_that_is_no_number_without_a_fold_has_a_reason() -> None:
    unknown = quantity(torch.ones(2), torch.full((2,), torch.nan), torch.ones(2))
    assert [estimate.code for estimate in unknown.estimates(num_folds=8)] == ["none_without_a_unit"] * 2


class PlainBatch:
    """A batch in plain floats per entry: level, forward, backward, their variances, the forward-backward covariance."""

    def __init__(self, generator: torch.Generator) -> None:
        self.level, self.forward, self.backward = (torch.randn(3, 6, generator=generator, dtype=torch.float64)).tolist()
        self.forward_batches, self.backward_batches = (1 + 2 * torch.rand(2, 6, generator=generator)).tolist()
        self.level_var, self.forward_var, self.backward_var, correlation = torch.rand(
            4, 6, generator=generator, dtype=torch.float64
        ).tolist()
        self.covariance = [
            (2 * r - 1) * math.sqrt(f * b)
            for r, f, b in zip(correlation, self.forward_var, self.backward_var, strict=True)
        ]

    def terms(self) -> tuple[Quantity, Quantity, Quantity, Tensor]:
        """Return level, forward, backward, and the standard error of ½(forward + backward)."""
        half_step = [
            0.5 * math.sqrt(f + b + 2 * c)
            for f, b, c in zip(self.forward_var, self.backward_var, self.covariance, strict=True)
        ]
        return (
            quantity(tensor(self.level), tensor(self.level_var).sqrt(), tensor([1.0] * 6)),
            quantity(tensor(self.forward), tensor(self.forward_var).sqrt(), tensor(self.forward_batches)),
            quantity(tensor(self.backward), tensor(self.backward_var).sqrt(), tensor(self.backward_batches)),
            tensor(half_step),
        )


def batches(seed: int = 0) -> list[PlainBatch]:
    generator = torch.Generator().manual_seed(seed)
    return [PlainBatch(generator) for _ in range(NUM_BATCHES)]


def feed(
    plain: list[PlainBatch], steps: list[int], total: TrapezoidSum = EMPTY
) -> tuple[TrapezoidSum, list[TrapezoidTerms]]:
    """Add the batches to the sum. Return the sum and its terms after each batch."""
    said = []
    for step, batch in zip(steps, plain, strict=True):
        total, terms = total.add(step, *batch.terms())
        said.append(terms)
    return total, said


def twin_sum(plain: list[PlainBatch], last: int) -> Tensor:
    """Return Σ_{j<last} ½(F_j + B_{j+1}), one interval at a time."""
    return tensor([sum(0.5 * (plain[j].forward[e] + plain[j + 1].backward[e]) for j in range(last)) for e in range(6)])


def twin_variance(plain: list[PlainBatch], last: int) -> Tensor:
    """Return that sum's variance aᵀCa over all F_j and B_j, where C has a 2×2 block for each batch."""
    out = []
    for e in range(6):
        covariance = torch.zeros(2 * (last + 1), 2 * (last + 1), dtype=torch.float64)
        coefficients = torch.zeros(2 * (last + 1), dtype=torch.float64)
        for j in range(last + 1):
            batch, f, b = plain[j], 2 * j, 2 * j + 1
            covariance[f, f], covariance[b, b] = batch.forward_var[e], batch.backward_var[e]
            covariance[f, b] = covariance[b, f] = batch.covariance[e]
        for j in range(last):
            coefficients[2 * j] += 0.5  # F_j
            coefficients[2 * (j + 1) + 1] += 0.5  # B_{j+1}
        out.append(float(coefficients @ covariance @ coefficients))
    return tensor(out)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


def test_sums_equal_the_plain_twin_at_every_batch() -> None:
    plain = batches()
    for last, terms in enumerate(feed(plain, list(range(1, NUM_BATCHES + 1)))[1]):
        close(terms.predicted.value, twin_sum(plain, last))
        close(terms.measured.value, tensor([a - b for a, b in zip(plain[last].level, plain[0].level, strict=True)]))
        if last:
            close(terms.trapezoid.value, twin_sum(plain, last) - twin_sum(plain, last - 1))


def test_at_the_first_batch_no_step_is_closed() -> None:
    _, first = EMPTY.add(4, *batches()[0].terms())
    assert first.trapezoid.value.isnan().all()
    assert first.trapezoid.stderr.isnan().all()
    for sums in (first.predicted.value, first.predicted.stderr, first.measured.value, first.measured.stderr):
        assert torch.equal(sums, torch.zeros(SHAPE, dtype=torch.float64))


def test_the_error_of_the_sum_is_exact_where_forward_and_backward_of_a_batch_are_correlated() -> None:
    plain = batches(seed=1)
    for last, terms in enumerate(feed(plain, list(range(1, NUM_BATCHES + 1)))[1]):
        close(terms.predicted.stderr.square(), twin_variance(plain, last))


def test_errors_of_one_step_and_of_the_measured_sum_add_two_independent_batches() -> None:
    plain = batches(seed=2)
    for last, terms in enumerate(feed(plain, list(range(1, NUM_BATCHES + 1)))[1]):
        if last:
            variances = zip(plain[last - 1].forward_var, plain[last].backward_var, strict=True)
            close(terms.trapezoid.stderr.square(), tensor([0.25 * (f + b) for f, b in variances]))
            variances = zip(plain[0].level_var, plain[last].level_var, strict=True)
            close(terms.measured.stderr.square(), tensor([a + b for a, b in variances]))


def test_a_trapezoids_error_has_at_least_the_degrees_of_freedom_of_its_weaker_half() -> None:
    plain = batches(seed=8)
    for last, terms in enumerate(feed(plain, list(range(1, NUM_BATCHES + 1)))[1]):
        if last:
            forward, backward = plain[last - 1], plain[last]
            of_forward = zip(forward.forward_var, forward.forward_batches, strict=True)
            of_backward = zip(backward.backward_var, backward.backward_batches, strict=True)
            known = [(*first, *other) for first, other in zip(of_forward, of_backward, strict=True)]
            of = [((f + b) / (f / math.sqrt(n) + b / math.sqrt(m))) ** 2 for f, n, b, m in known]
            close(terms.trapezoid.batches, tensor(of))
            pairs = zip(forward.forward_batches, backward.backward_batches, strict=True)
            assert (terms.trapezoid.batches >= tensor([min(pair) for pair in pairs])).all()


def test_the_effective_number_of_batches_of_the_sum_is_satterthwaites() -> None:
    """½F has variance 1, the half steps 2 and 3, ½B 1. The effective number of batches is (Σv)²/Σv² so far."""
    unit, total, known = torch.ones((), dtype=torch.float64), TrapezoidSum.empty(), []
    for step, half_step_variance in enumerate((9.0, 2.0, 3.0, 9.0)):  # the first and the last one are not used
        stderr, half_step = 2 * unit, unit * math.sqrt(half_step_variance)
        level, change = quantity(unit, unit, unit), quantity(unit, stderr, unit)
        total, terms = total.add(step + 1, level, change, change, half_step)
        known.append(float(terms.predicted.batches))
    assert known[1:] == pytest.approx([(1 + 1) ** 2 / 2, (1 + 2 + 1) ** 2 / 6, (1 + 2 + 3 + 1) ** 2 / 15])


def test_a_skipped_step_is_bridged_by_the_measured_change_and_reported() -> None:
    plain = batches(seed=3)
    answers = feed(plain, [1, 2, 3, 5, 6, 7])[1]
    level_difference = tensor(plain[3].level) - tensor(plain[2].level)
    for last, terms in enumerate(answers):
        bridged = level_difference - (twin_sum(plain, 3) - twin_sum(plain, 2)) if last >= 3 else 0.0
        close(terms.predicted.value, twin_sum(plain, last) + bridged)
        close(terms.measured.value, tensor([a - b for a, b in zip(plain[last].level, plain[0].level, strict=True)]))
        assert terms.predicted.remark == ("bridged: 2 steps by the measured change, the last of them 4" * (last >= 3))
    assert answers[3].trapezoid.value.isnan().all()
    # ½F_1; the half step of batch 2; ½B_3 and level of batch 3, which are from the same batch; the level of batch 4.
    both = [
        (0.5 * math.sqrt(b) + math.sqrt(variance)) ** 2
        for b, variance in zip(plain[2].backward_var, plain[2].level_var, strict=True)
    ]
    parts = zip(plain[0].forward_var, both, plain[3].level_var, strict=True)
    others = tensor([0.25 * forward + third + fourth for forward, third, fourth in parts])
    close(answers[3].predicted.stderr.square(), others + plain[1].terms()[3].square())


def test_a_step_without_forward_is_bridged_by_backward_with_a_wider_error_bar() -> None:
    plain = batches(seed=4)
    plain[2].forward = [math.nan] * 6
    answers = feed(plain, list(range(1, NUM_BATCHES + 1)))[1]
    halves = [0.5 * (tensor(plain[j + 1].backward) - tensor(plain[j].forward)) for j in (0, 1)]
    second_order = (0.5 * (halves[0].square() + halves[1].square())).sqrt()
    close(answers[3].predicted.value, twin_sum(plain, 2) + tensor(plain[3].backward))
    # ½F_1; the half step of batch 2; ½B_3, which has no forward after it; B_4; and the second-order remainder.
    parts = zip(plain[0].forward_var, plain[2].backward_var, plain[3].backward_var, strict=True)
    others = tensor([0.25 * f + 0.25 * b + after for f, b, after in parts])
    close(answers[3].predicted.stderr.square(), others + plain[1].terms()[3].square() + second_order.square())
    assert answers[3].predicted.remark == "bridged: step 3 by backward alone"
    assert not answers[2].predicted.remark


def test_the_predicted_sum_is_missing_before_the_first_trapezoid_and_then_covers_all_steps() -> None:
    """One probe measures only every second step; another cannot predict its first step."""
    plain = batches(seed=5)
    for terms in feed(plain, [1, 3, 5, 7, 9, 11])[1][1:]:
        assert terms.predicted.value.isnan().all()
        assert terms.predicted.reason
    plain[0].forward = [math.nan] * 6
    _, second, third, *_ = feed(plain, list(range(1, NUM_BATCHES + 1)))[1]
    assert second.predicted.value.isnan().all()
    trapezoid = 0.5 * (tensor(plain[1].forward) + tensor(plain[2].backward))
    close(third.predicted.value, tensor(plain[1].level) - tensor(plain[0].level) + trapezoid)


def test_consecutive_measured_changes_have_the_error_of_their_two_ends() -> None:
    """The level of the batch between them cancels."""
    plain = batches(seed=6)
    _, (*_, two, four) = feed(plain[:4], [1, 2, 4, 6])
    without_ends = [
        terms.predicted.stderr.square() - tensor(batch.level_var)
        for terms, batch in zip((two, four), plain[2:], strict=False)
    ]
    close(*without_ends)


def test_a_batch_without_an_error_bar_leaves_the_sum_without_one_and_a_remark() -> None:
    plain = batches(seed=7)
    total, _ = feed(plain[:2], [1, 2])
    level, forward, backward, _ = plain[2].terms()
    total, _ = total.add(3, level, forward, backward, tensor([math.nan] * 6))
    predicted = total.add(4, *plain[3].terms())[1].predicted
    assert predicted.value.isfinite().all()
    assert predicted.stderr.isnan().all()
    assert "too few folds" in predicted.remark


def test_error_bars_of_bridged_sums_cover_the_truth() -> None:
    """4000 runs at once. Their steps have a second order, and each batch has noise that all of its estimates share."""
    steps, runs, curvature = 24, 4000, 0.2
    generator = torch.Generator().manual_seed(0)

    def noise(sd: float) -> Tensor:
        return sd * torch.randn(runs, generator=generator, dtype=torch.float64)

    unit = torch.ones(runs, dtype=torch.float64)
    changes = [noise(1.0) for _ in range(steps)]
    total, truth, level = TrapezoidSum.empty(runs), torch.zeros(runs, dtype=torch.float64), 0.0
    for step in range(steps):
        common = noise(0.3)
        forward = changes[step] - curvature + common + noise(0.4)
        backward = (changes[step - 1] + curvature if step else 0.0) + 0.5 * common + noise(0.3)
        if step in (6, 13):
            forward = forward * math.nan
        values = zip((level + common + noise(0.5), forward, backward), (0.34, 0.25, 0.1125), strict=True)
        quantities = [Quantity("", value, unit * math.sqrt(variance), step, batches=unit) for value, variance in values]
        if step != 18:  # the batch of step 18 is not measured
            half_step = math.sqrt(0.25 * ((1.5 * 0.3) ** 2 + 0.4**2 + 0.3**2))
            total, terms = total.add(step + 1, *quantities, unit * half_step)
            predicted = terms.predicted
            off = (predicted.value - truth) / predicted.stderr
            if step:
                assert float((off.abs() < 1.96).double().mean()) > 0.93, step
        truth = truth + changes[step]
        level = truth
    assert float(off.std()) > 0.7  # and the bars are not uselessly wide


@pytest.mark.parametrize("saved_after", [0, 1, 2, 4])
def test_a_sum_restored_from_a_file_continues_as_if_never_stopped(saved_after: int) -> None:
    plain = batches(seed=5)
    steps = list(range(1, NUM_BATCHES + 1))
    _, uninterrupted = feed(plain, steps)
    before, _ = feed(plain[:saved_after], steps[:saved_after])
    resumed = from_tensors(EMPTY, load(save({k: v.clone() for k, v in to_tensors(before).items()})))
    _, answers = feed(plain[saved_after:], steps[saved_after:], resumed)
    for got, expected in zip(answers, uninterrupted[saved_after:], strict=True):
        for name, first, other in zip(TrapezoidTerms._fields, got, expected, strict=True):
            for key in ("value", "stderr", "batches"):
                assert torch.equal(getattr(first, key).nan_to_num(-7), getattr(other, key).nan_to_num(-7)), (name, key)
    close(answers[-1].predicted.value, twin_sum(plain, NUM_BATCHES - 1))

"""Products of gradients of different steps: twins, closed forms, and the probe in its loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from test_gns import DIM, Loop, Truth, adamw_states, preconditioner, seeded
from torch import Tensor

from rl_training.mathematics.adamw import WARM_STEPS
from rl_training.mathematics.lag_products import lag_averages, persistence_weights
from rl_training.mathematics.noise_scale import signal_to_noise_interval
from rl_training.probes import GradientNoiseScaleProbe

LAGS, DECAY = 3, 0.8


def history_of(gradients: Tensor, moments: Tensor, steps: Sequence[int], lags: int = LAGS) -> Tensor:
    """Returns the history of these mean gradients, (steps, DIM), and moments, (steps, 2), product by product."""
    row_of = {step: row for row, step in enumerate(steps)}
    products = [
        [float(gradients[row] @ gradients[row_of[s - n]]) if s - n in row_of else math.nan for n in range(1, lags + 1)]
        for row, s in enumerate(steps)
    ]
    numbers = torch.tensor(steps, dtype=torch.float64).unsqueeze(1)
    return torch.cat([numbers, moments, torch.tensor(products, dtype=torch.float64)], dim=1)


def twin(history: Tensor, left_out: int | None) -> tuple[float, float, list[float]]:
    """Returns tr Σ, |Ḡ|² and the mean products without one row's batch, sum by sum from the definition."""
    rows = history.tolist()
    age = {row[0]: len(rows) - 1 - number for number, row in enumerate(rows)}
    gone = None if left_out is None else rows[left_out][0]

    def mean(column: int, lag: int) -> float:
        kept = [(DECAY ** age[r[0]], r[column]) for r in rows if gone not in (r[0], r[0] - lag)]
        kept = [(weight, value) for weight, value in kept if not math.isnan(value)]
        return sum(w * x for w, x in kept) / sum(w for w, _ in kept)

    products = [mean(2 + lag, lag) for lag in range(1, LAGS + 1)]
    window = LAGS + 1
    covariances = {0: mean(2, 0), **dict(enumerate(products, start=1))}
    pairs = [covariances[abs(i - j)] for i in range(window) for j in range(window)]
    return mean(1, 0), sum(pairs) / window**2, products


def test_averages_and_errors_are_those_of_leaving_out_one_batch_after_another_with_all_its_products() -> None:
    """With a hole in the steps, so that rows are not lags."""
    generator = seeded(0)
    steps = [1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13]
    gradients, moments = (torch.randn(len(steps), n, generator=generator, dtype=torch.float64) + 1 for n in (DIM, 2))
    history = history_of(gradients, moments, steps)
    persistent, of_lags = lag_averages(history, DECAY)
    trace, square, products = twin(history, None)
    assert persistent.means.tolist() == pytest.approx([trace, square], rel=1e-12)
    assert [float(lag.means[1]) for lag in of_lags] == pytest.approx(products, rel=1e-12)
    without = [twin(history, row) for row in range(len(steps))]
    count = len(steps)
    for averages, values in [
        (persistent, [[w[0], w[1]] for w in without]),
        *((of_lags[n], [[w[0], w[2][n]] for w in without]) for n in range(LAGS)),
    ]:
        spread = torch.tensor(values, dtype=torch.float64).T.cov(correction=0) * (count - 1)
        torch.testing.assert_close(averages.covariance, spread, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("gradient_of_step", "square"),
    [
        (lambda s: torch.ones(DIM), float(DIM)),  # it persists: all of it
        (lambda s: torch.ones(DIM) * (-1) ** s, 0.0),  # it swings from step to step: nothing
        (lambda s: torch.eye(DIM)[s % DIM], 1 / (LAGS + 1)),  # each at right angles to those before
    ],
    ids=["persists", "swings", "turns"],
)
def test_what_persists_of_gradients_without_noise_is_the_square_of_their_mean(gradient_of_step, square) -> None:
    loop = Loop(GradientNoiseScaleProbe(lags=LAGS))
    for step in range(8):
        gradient = gradient_of_step(step).double()
        answers = loop.step(gradient.expand(2, 2, DIM).contiguous())
    assert answers["gns/persistent_grad_sq_norm"].value == pytest.approx(square, abs=1e-12)
    for lag in range(1, LAGS + 1):
        expected = float(gradient_of_step(7).double() @ gradient_of_step(7 - lag).double())
        assert answers[f"gns/lag/{lag}"].value == pytest.approx(expected, abs=1e-12)


def test_weights_are_those_of_all_pairs_of_a_window() -> None:
    pairs = [abs(i - j) for i in range(5) for j in range(5)]
    assert persistence_weights(4).tolist() == pytest.approx([pairs.count(n) / 25 for n in range(5)])


def test_products_are_those_of_the_mean_gradients_plain_and_in_adams_metric() -> None:
    """One step has one product a lag; the metric is the later step's."""
    truth, generator = Truth(), seeded(1)
    states = [adamw_states(step=WARM_STEPS + n) for n in range(3)]
    loop = Loop(GradientNoiseScaleProbe(lags=2))
    vectors = [truth.draw(2, 4, generator=generator) + 1.0 for _ in range(3)]
    for of_step, state in zip(vectors, states, strict=True):
        loop.states = state
        answers = loop.step(of_step)
    last, *_ = means = [of_step.mean(dim=(0, 1)) for of_step in reversed(vectors)]
    metric = preconditioner(states[2])
    assert answers["gns/lag/2"].value == pytest.approx(float(last @ means[2]), rel=1e-12)
    assert answers["gns/adam_lag/2"].value == pytest.approx(float((metric * last) @ means[2]), rel=1e-9)


def test_products_have_no_noise_of_one_batch_squared_in_them_and_bars_hold_what_persists() -> None:
    """200 runs of 40 steps of the same true gradient, whose square is a third of the batch's noise.

    The bars are too wide where noise is most of it, as the module says: their squares by a factor of 2 at most.
    """
    truth, generator, lags = Truth(), seeded(2), 4
    trace, grad_sq_norm = truth.moments()
    hits, within, values, variances = 0, 0, [], []
    for _ in range(200):
        gradients = truth.draw(40, 8, generator=generator).mean(dim=1)
        sample = truth.draw(40, 8, generator=generator)  # tr Σ and |G|² of other sequences: their errors are their own
        variance = sample.var(dim=1).sum(dim=1)
        moments = torch.stack([variance, sample.mean(dim=1).square().sum(dim=1) - variance / 8], dim=1)
        products = torch.full((40, lags), math.nan, dtype=torch.float64)
        for lag in range(1, lags + 1):
            products[lag:, lag - 1] = (gradients[lag:] * gradients[:-lag]).sum(dim=1)
        steps = torch.arange(40, dtype=torch.float64).unsqueeze(1)
        persistent, of_lags = lag_averages(torch.cat([steps, moments, products], dim=1), decay=0.95)
        low, high = signal_to_noise_interval(persistent)
        within += low < grad_sq_norm / trace < high
        values.append(float(of_lags[0].means[1]))
        variances.append(float(of_lags[0].covariance[1, 1]))
        hits += abs(values[-1] - grad_sq_norm) < 2.1 * math.sqrt(variances[-1])
    scatter = torch.tensor(values).var()
    assert abs(torch.tensor(values).mean() - grad_sq_norm) < 3 * (scatter / 200).sqrt() < 0.2 * grad_sq_norm
    assert hits / 200 > 0.93
    assert within / 200 > 0.93
    assert 1.0 < torch.tensor(variances).mean() / scatter < 2.5


def test_state_brings_a_resumed_probe_to_the_same_answers() -> None:
    truth, generator = Truth(), seeded(3)
    loop = Loop(GradientNoiseScaleProbe(lags=LAGS), states=adamw_states())
    for _ in range(5):
        loop.step(truth.draw(2, 4, generator=generator))
    resumed = Loop(GradientNoiseScaleProbe(lags=LAGS), states=adamw_states())
    resumed.steps = loop.steps
    resumed.probe.load_state_dict({name: tensor.clone() for name, tensor in loop.probe.state_dict().items()})
    for _ in range(2):
        vectors = truth.draw(2, 4, generator=generator)
        assert repr(resumed.step(vectors)) == repr(loop.step(vectors))


def test_lags_that_cannot_be_had_yet_say_so_and_do_not_cost_the_others() -> None:
    truth, generator, loop = Truth(), seeded(4), Loop(GradientNoiseScaleProbe(lags=LAGS))
    first = loop.step(truth.draw(2, 4, generator=generator))
    assert "so far apart" in first["gns/lag/1"].reason
    assert "10 steps behind it" in first["gns/adam_lag/1"].reason
    second = loop.step(truth.draw(2, 4, generator=generator))
    assert math.isfinite(second["gns/lag/1"].value)
    assert "so far apart" in second["gns/persistent_noise_scale_prompts"].reason
    assert math.isnan(loop.step(torch.ones(1, 4, DIM, dtype=torch.float64))["gns/lag/1"].value)  # a step with one block
    after = loop.step(truth.draw(2, 4, generator=generator))
    kept = loop.probe.state_dict()["lags"][:, 0]  # of the plain metric
    assert kept[:, 0].tolist() == [1, 2, 4]
    assert kept[2, 3:].isnan().tolist() == [True, False, False]  # step 3 was not measured
    assert math.isnan(after["gns/persistent_grad_sq_norm"].value) is False


def test_a_lag_is_in_steps() -> None:
    with pytest.raises(ValueError, match="every=1"):
        GradientNoiseScaleProbe(lags=2, every=2)
    assert not any(
        "lag" in name for name in Loop(GradientNoiseScaleProbe()).step(Truth().draw(2, 4, generator=seeded(5)))
    )

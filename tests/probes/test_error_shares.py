"""What of forward's variance comes from X and what from the update, where both are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_training import Estimate
from rl_training.engine.entropy_change import FORWARD, LEVELS, PRODUCTS, REUSE, FoldSums, statistic
from rl_training.engine.entropy_gradients import EntropySettings
from rl_training.mathematics.jackknife import jackknife_stderr
from rl_training.probes.error_shares import ErrorSharesProbe, error_terms

K, DIM, RATE = 80, 6, 0.1
NOISE_OF_X, NOISE_OF_G = 0.3, 2.0


def drawn(generator: torch.Generator, together: float) -> FoldSums:
    """Returns the sums of K folds of one sequence and one token each, for SGD, from their X_k and g_k.

    The means are (1, 0, …) and (1, 1, 0, …). X has its noise where g has none and the reverse, with this correlation.
    """
    noise = torch.randn(2, K, generator=generator, dtype=torch.float64)
    noise[1] = together * noise[0] + (1 - together**2) ** 0.5 * noise[1]
    x, g = (torch.zeros(K, DIM, dtype=torch.float64) for _ in range(2))
    x[:, 0], x[:, 1] = 1.0, NOISE_OF_X * noise[0]
    g[:, 0], g[:, 1] = 1.0 + NOISE_OF_G * noise[1], 1.0
    step = -RATE * g.mean(dim=0)
    without_fold = -RATE * (g.sum(dim=0) - g) / (K - 1)
    rows = torch.zeros(K, LEVELS + 2 * len(PRODUCTS), dtype=torch.float64)
    rows[:, :LEVELS] = 1.0
    pairs = rows[:, LEVELS:].view(K, -1, 2)
    pairs[:, FORWARD] = (x * without_fold).sum(dim=1, keepdim=True)
    pairs[:, REUSE] = (x @ step).unsqueeze(1)
    shift = x @ (without_fold - step).T  # X_k · (δθ_(−l) − δθ)
    lost = (shift.sum(dim=0) - shift.diagonal()).unsqueeze(1).expand(K, 2)
    without = rows.sum(dim=0) - rows
    without[:, LEVELS:].view(K, -1, 2)[:, FORWARD] += lost
    return FoldSums(rows.sum(dim=0), without, K)


def known(together: float) -> Tensor:
    """Returns the variances that X, δθ and both together bring to the mean of K products, (3,)."""
    of_x = NOISE_OF_X * RATE  # noise of X_k · E[δθ]
    of_step = RATE * NOISE_OF_G  # noise of E[X] · (−RATE g_k)
    return torch.tensor([of_x**2, of_step**2, 2 * together * of_x * of_step], dtype=torch.float64) / K


@pytest.mark.parametrize("together", [0.0, 0.8, -0.8])
def test_shares_are_those_of_gradients_whose_noise_is_known(together: float) -> None:
    generator = torch.Generator().manual_seed(0)
    terms = torch.stack([error_terms(drawn(generator, together)) for _ in range(200)])
    found, error = terms.mean(dim=0)[:, 0], terms.std(dim=0)[:, 0] / 200**0.5
    expected = known(together)
    # The part of δθ is taken too small by (K − 2)/(K − 1), its square by 2.5 % with K = 80.
    assert ((found - expected).abs() < 3 * error + 0.04 * known(1.0).sum()).all()
    assert (error < 0.05 * known(1.0).sum()).all()


def test_they_add_up_to_the_variance_that_forward_reports() -> None:
    sums = drawn(torch.Generator().manual_seed(1), 0.5)
    stderr = jackknife_stderr(statistic, sums.total, sums.without, lambda tensor: tensor)[1 + FORWARD]
    torch.testing.assert_close(error_terms(sums).sum(dim=0), stderr.square(), rtol=1e-12, atol=0)


def step_with(sums: FoldSums | None, ranks: int = 1, why_no_forward: str = "") -> Any:
    """Returns what the probe reads of a step."""
    change = SimpleNamespace(
        sums=sums, settings=EntropySettings(per_sequence=True), why_none="", why_no_forward=why_no_forward
    )
    known = {"ranks": SimpleNamespace(count=ranks), "capabilities": SimpleNamespace(num_folds=K)}
    return SimpleNamespace(entropy_change=change, **known)


def said(probe: ErrorSharesProbe, step: Any) -> list[Estimate]:
    probe.prepare(step)
    return list(probe.results().values())


def test_shares_are_ratios_of_averages_over_steps_and_go_on_after_a_stop() -> None:
    generator, shares, resumed = torch.Generator().manual_seed(2), ErrorSharesProbe(0.5), ErrorSharesProbe(0.5)
    first, second = (drawn(generator, 0.3) for _ in range(2))
    shares.prepare(step_with(first))
    resumed.load_state_dict(shares.state_dict())
    expected = (0.5 * error_terms(first) + error_terms(second)) / 1.5
    expected = expected / expected.sum(dim=0)
    for probe in (shares, resumed):
        found = [estimate.value for estimate in said(probe, step_with(second))]
        assert found == pytest.approx(expected.flatten().tolist())


def test_several_processes_and_no_forward_are_nan_with_the_reason() -> None:
    for step, word in ((step_with(None, ranks=2), "one process"), (step_with(None, 1, "no such step"), "no such step")):
        assert all(word in estimate.reason for estimate in said(ErrorSharesProbe(0.5), step))

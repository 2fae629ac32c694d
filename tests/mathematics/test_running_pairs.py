"""Means over steps of two estimates with their covariance, by hand."""

from __future__ import annotations

import pytest
import torch

from rl_training.mathematics.running_pairs import Pair, RunningPair, RunningPairs


def pair(first: float, second: float, variance: float) -> Pair:
    covariance = torch.tensor([[variance, 0.0], [0.0, 1.0]], dtype=torch.float64)
    return Pair(torch.tensor([first, second], dtype=torch.float64), covariance, degrees=10.0)


def test_mean_its_variance_and_its_degrees_of_freedom_by_hand() -> None:
    """Weights .5 and 1, variances 4 and 1: the variance is (.25·4 + 1)/1.5², of 2²/((1² + 1²)/10) = 20 degrees."""
    running = RunningPair(decay=0.5)
    running.add(pair(3.0, 0.0, 4.0))
    mean = running.add(pair(6.0, 3.0, 1.0))
    assert mean.values.tolist() == pytest.approx([5.0, 2.0])
    assert float(mean.covariance[0, 0]) == pytest.approx(2 / 2.25)
    assert float(mean.covariance[1, 1]) == pytest.approx(1.25 / 2.25)
    assert mean.degrees == pytest.approx(20.0)


def test_what_a_checkpoint_does_not_have_begins_anew() -> None:
    running = RunningPairs({"old": RunningPair(0.5), "new": RunningPair(0.5)})
    for mean in running.values():
        mean.add(pair(3.0, 0.0, 4.0))
    kept = running["old"].state
    running.load_state_dict({"old": kept})
    assert (running["old"].steps, running["new"].steps) == (1, 0)
    assert running["new"].add(pair(6.0, 3.0, 1.0)).values.tolist() == [6.0, 3.0]

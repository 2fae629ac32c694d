"""Drawing a few of many terms: unbiased by enumeration, exact in number, and the same on any machine."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from rl_training.mathematics.draws import EVEN, drawn, inclusion_probabilities, keys_of, uniforms_of


def expected_sum(values: Tensor, probability: Tensor) -> float:
    """Returns the mean over u of Σ_drawn x / π, for one stratum: what is drawn changes only at the intervals' ends."""
    ends = sorted({0.0, 1.0, *(float(end) % 1.0 for end in probability.cumsum(0))})
    zeros, total = torch.zeros(len(values), dtype=torch.long), 0.0
    for low, high in itertools.pairwise(ends):
        if high - low < 1e-12:
            continue
        taken = drawn(probability, zeros, torch.tensor([(low + high) / 2], dtype=torch.float64))
        total += (high - low) * float((values / probability)[taken].sum())
    return total


def plain_draw(probability: list[float], u: float) -> list[bool]:
    """The definition: walk along the intervals, and see whether one of u, u + 1, … lies in each."""
    start, taken = 0.0, []
    for length in probability:
        taken.append(any(start <= u + j < start + length for j in range(len(probability))))
        start += length
    return taken


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_the_reweighted_sum_is_unbiased_by_enumeration(count: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(8, generator=generator, dtype=torch.float64)
    guesses = (spread * torch.randn(8, generator=generator, dtype=torch.float64)).exp()
    probability = inclusion_probabilities(guesses, torch.zeros(8, dtype=torch.long), torch.tensor([count]))
    assert float(probability.sum()) == pytest.approx(count, abs=1e-12)
    assert expected_sum(values, probability) == pytest.approx(float(values.sum()), abs=1e-9)


def test_probabilities_by_hand() -> None:
    """One of four, guesses 3, 1, 0, 0: .8 · 3/4 + .2/4 = .65, .25, .05, .05. Two of them: 1.3 is too much for the
    first, and the other three share one: .8 + .2/3, .2/3, .2/3."""
    guesses, stratum = torch.tensor([3.0, 1.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long)
    assert EVEN == 0.2
    one = inclusion_probabilities(guesses, stratum, torch.tensor([1])).tolist()
    assert one == pytest.approx([0.65, 0.25, 0.05, 0.05])
    two = inclusion_probabilities(guesses, stratum, torch.tensor([2])).tolist()
    assert two == pytest.approx([1.0, 0.8 + 0.2 / 3, 0.2 / 3, 0.2 / 3])


def test_without_any_guess_all_are_equally_likely_and_all_are_drawn_where_all_are_asked_for() -> None:
    stratum = torch.tensor([0, 0, 0, 0, 1, 1])
    probability = inclusion_probabilities(torch.zeros(6), stratum, torch.tensor([1, 2]))
    assert probability.tolist() == pytest.approx([0.25] * 4 + [1.0] * 2)
    assert drawn(probability, stratum, torch.tensor([0.999, 0.999])).tolist() == [False, False, False, True, True, True]


def test_strata_that_lie_mixed_are_drawn_as_the_plain_walk_does() -> None:
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(100):
        stratum = torch.randint(0, 3, (20,), generator=generator)
        sizes = torch.bincount(stratum, minlength=3)
        counts = torch.tensor([rng.randint(1, max(1, int(size))) for size in sizes])
        probability = inclusion_probabilities(torch.rand(20, generator=generator).exp(), stratum, counts)
        uniforms = torch.rand(3, generator=generator, dtype=torch.float64)
        taken = drawn(probability, stratum, uniforms)
        for s in range(3):
            of = stratum == s
            assert taken[of].tolist() == plain_draw(probability[of].tolist(), float(uniforms[s]))
            assert int(taken[of].sum()) == (int(counts[s]) if sizes[s] else 0)


def test_uniforms_are_uniform_and_differ_by_key_seed_and_step() -> None:
    keys = torch.arange(4096)
    first = uniforms_of(keys, seed=0, step=1)
    assert float(first.min()) >= 0.0
    assert float(first.max()) < 1.0
    counts = torch.histc(first.float(), bins=16, min=0, max=1)
    assert float(((counts - 256) ** 2 / 256).sum()) < 37.7  # χ² of 15 degrees, 0.1 %
    for other in (uniforms_of(keys, seed=1, step=1), uniforms_of(keys, seed=0, step=2), first.roll(1)):
        correlation = torch.corrcoef(torch.stack([first, other]))[0, 1]
        assert abs(float(correlation)) < 4 / 64


def test_a_known_number_of_splitmix64() -> None:
    """Its reference implementation, started at 0, gives 16294208416658607535 first."""
    from rl_training.mathematics.draws import _mix

    assert int(_mix(torch.tensor([0]))) % 2**64 == 16294208416658607535


def test_a_key_does_not_depend_on_padding_and_does_on_every_token() -> None:
    ids = torch.tensor([[7, 8, 9], [0, 8, 9], [8, 7, 9]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1]])
    keys = keys_of(ids, mask)
    wider = keys_of(torch.cat([torch.full((3, 2), 5), ids], dim=1), torch.cat([torch.zeros(3, 2).long(), mask], dim=1))
    assert keys.tolist() == wider.tolist()
    assert len(set(keys.tolist())) == 3

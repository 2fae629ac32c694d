"""What an analysis measures, with numbers worked by hand: a tabular policy with a single parameter."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_training.offline import truth
from rl_training.offline.buffers import SampledBuffer, units_of
from rl_training.offline.first_order import FirstOrder
from rl_training.offline.sweep import over_sizes
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.probes.fresh_sample import without_blocks
from rl_training.statistics.jackknife import JackknifeUnits, Replicates

LENGTHS = torch.tensor([4, 1, 3, 2, 2, 1, 4, 3])
ALONG = torch.linspace(-0.3, 0.4, 32, dtype=torch.float64).view(8, 4).sin()  # slopes of log-probabilities


class Line:
    """A restored trainer with one parameter x. E's tokens have log-probability −1 + x·ALONG and entropy 1 + x².

    Fresh responses to E's prompts have entropy 1 + 2x + 3x² at every token. An entropy scored in row r of a batch is
    off by r/1000.
    """

    def __init__(self, far: float = 1.0) -> None:
        self.x = 0.0
        self.far = far  # scale of the log-probabilities' changes
        self.policy = self
        self.drawn_at: list[float] = []

    @contextlib.contextmanager
    def stepped(self, delta: list[Tensor], eta: float) -> Iterator[None]:
        self.x = eta * float(delta[0])
        yield
        self.x = 0.0

    def batches_of(self, rows: Tensor) -> list[Tensor]:
        return [rows]

    def score_rollout(self, rollout: Rollout, batches: Sequence[Any] = (slice(None),)) -> Scores:
        by_batch = [rollout.prompt_index[rows] for rows in batches]
        number = torch.cat(by_batch)
        places = [torch.arange(len(part), dtype=torch.float64) for part in by_batch]
        off = torch.cat(places).unsqueeze(1) / 1000  # scores depend a little on the place in the batch
        mask = (torch.arange(4) < LENGTHS[number].unsqueeze(1)).double()
        return Scores((-1 + self.far * self.x * ALONG[number]) * mask, (1 + self.x**2 + off) * mask, mask.bool())

    def draw(self) -> Scores:
        self.drawn_at.append(self.x)
        mask = torch.ones(8, 4, dtype=torch.float64)
        return Scores(-mask, (1 + 2 * self.x + 3 * self.x**2) * mask, mask.bool())


@pytest.fixture(autouse=True)
def by_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "gather_scores", lambda line, scores, number, total: scores)
    monkeypatch.setattr(truth, "sample_again", lambda line, *_: line.draw())


def evaluation(line: Line, responses: int = 1) -> SampledBuffer:
    mask = torch.arange(4) < LENGTHS.unsqueeze(1)
    ids = torch.zeros(8, 4, dtype=torch.long)
    rollout = Rollout(ids, ids, ids, mask.long(), torch.zeros(8), None, torch.arange(8), None, True)
    scores = line.score_rollout(rollout)
    return SampledBuffer(rollout, torch.arange(8), scores, *units_of(scores, responses), rows=(), seed=0, chunk_size=1)


def measured(line: Line, e: SampledBuffer, eta: float = 1.0) -> truth.Truth:
    return truth.measure(line, e, [torch.ones(1)], [eta], True)  # type: ignore[arg-type]


# --- the unit is the prompt -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", [0.3, 3.0], ids=["weights", "resampled"])
def test_measurements_on_several_responses_leave_out_whole_prompts(far: float) -> None:
    line = Line(far)
    measurement = measured(line, evaluation(line, responses=2))
    at = measurement.at[0]
    assert at.forward.is_resampled == (far == 3.0)
    assert at.odd is not None
    for replicates in (
        at.forward.true,
        at.forward.snis,
        at.odd,
        measurement.before,
        measurement.floor,
        measurement.first_order,
    ):
        assert replicates.without.shape == (4, 2)
    lengths, tokens = LENGTHS.view(4, 2).sum(dim=1).double(), measurement.before.without[:, 0]
    off = (torch.arange(8) * LENGTHS).view(4, 2).sum(dim=1).double() / 1000
    assert tokens.tolist() == pytest.approx((1 + (off.sum() - off) / (lengths.sum() - lengths)).tolist(), rel=1e-12)


def test_with_a_single_prompt_its_responses_are_left_out() -> None:
    line = Line()
    assert measured(line, evaluation(line, responses=8)).before.without.shape == (8, 2)


def test_blocks_are_whole_prompts_filling_a_microbatch_and_at_least_32_where_possible() -> None:
    def blocks(prompts: int, responses: int, microbatch: int) -> list[int]:
        n = prompts * responses
        scores = Scores(*(torch.zeros(n, 1),) * 3)
        e = SampledBuffer(None, torch.arange(n), scores, *units_of(scores, responses), rows=(), seed=0, chunk_size=1)  # type: ignore[arg-type]
        return e.blocks(microbatch).number.unique(return_counts=True)[1].tolist()

    assert blocks(32, 8, 32) == [8] * 32
    assert blocks(128, 8, 32) == [32] * 32
    assert blocks(70, 3, 4) == [3] * 70
    assert blocks(5, 3, 4) == [3] * 5
    assert blocks(1, 64, 32) == [2] * 32
    assert blocks(65, 1, 32) == [2] * 32 + [1]


@pytest.mark.parametrize("far", [0.3, 3.0], ids=["weights", "resampled"])
def test_a_part_of_e_gives_the_measurement_of_a_smaller_e_with_these_prompts(far: float) -> None:
    line = Line(far)
    e = evaluation(line, responses=2)
    row, whole = over_sizes(measured(line, e), [6, 8])
    measurement = measured(line, e)
    for key, replicates in (
        ("deltaH_true", measurement.at[0].forward.true),
        ("deltaH_snis", measurement.at[0].forward.snis),
    ):
        assert row[key] == pytest.approx(float(replicates.without[3, 0]), rel=1e-12)  # all prompts except the last
        assert whole[f"{key}_se"] == pytest.approx(float(replicates.stderr[0]), rel=1e-12)
    assert row["paired_error_odd"] == pytest.approx(
        float((measurement.first_order - measurement.at[0].odd).without[3, 0]), rel=1e-12, abs=1e-15
    )


# --- sums over blocks, by hand ----------------------------------------------------------------------------------------


def test_leaving_out_a_block_divides_by_the_tokens_or_sequences_that_remain() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    sums = torch.tensor([[[1.0, 10.0]], [[2.0, 20.0]]])  # (2 blocks, 1 label, per token and per sequence)
    replicates = without_blocks(sums, mask, JackknifeUnits.of_rows(mask).in_blocks(2))
    assert replicates.value.tolist() == [[3.0, 30.0]]
    assert replicates.without.tolist() == [
        [pytest.approx([2 / (1 / 6), 20 / (1 / 3)])],
        [pytest.approx([1 / (5 / 6), 10 / (2 / 3)])],
    ]


def test_the_error_of_a_prediction_adds_those_of_both_buffers_in_quadrature() -> None:
    left_out = torch.tensor([1.0, -1.0] * 4).view(8, 1, 1).expand(8, 1, 2)  # standard error √(7/8 · 8)
    both = [Replicates(torch.zeros(1, 2), size * left_out) for size in (3.0, 4.0)]
    prediction = FirstOrder(("whole",), *both, direction=torch.zeros(2, 1))
    assert prediction.stderr.tolist() == [pytest.approx([5 * 7**0.5] * 2)]


# --- fresh samples, and the floor -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("far", "ess", "afresh"), [(0.3, 7.70, False), (0.4, 7.47, True)])
def test_importance_weights_are_used_down_to_an_effective_sample_size_of_95_percent(
    far: float, ess: float, afresh: bool
) -> None:
    weights = [math.exp(far * sum(row[:length])) for row, length in zip(ALONG.tolist(), LENGTHS.tolist(), strict=True)]
    assert sum(weights) ** 2 / sum(w * w for w in weights) == pytest.approx(ess, abs=0.01)
    line = Line(far)
    at = measured(line, evaluation(line)).at[0]
    assert at.forward.weights.ess == pytest.approx(ess, abs=0.01)
    assert at.forward.is_resampled == afresh
    assert (1.0 in line.drawn_at) == afresh


def test_a_backward_step_is_sampled_at_its_own_weights() -> None:
    line = Line(far=3.0)
    measurement = measured(line, evaluation(line), eta=2.0)
    assert line.drawn_at == [2.0, -2.0]
    at, off = measurement.at[0], float((torch.arange(8) * LENGTHS).sum() / LENGTHS.sum()) / 1000
    assert at.odd is not None
    assert float(at.forward.true.value[0]) == pytest.approx(2 * 2 + 3 * 4 - off)
    assert float(at.odd.value[0]) == pytest.approx(2 * 2)


def test_the_noise_floor_compares_scorings_with_differently_composed_batches() -> None:
    line = Line()
    places = torch.empty(8)
    places[LENGTHS.argsort(stable=True)] = torch.arange(4.0).repeat(2)  # two batches: short sequences and long ones
    assert places.tolist() == [2, 0, 0, 2, 3, 1, 3, 1]
    off = float(((places - torch.arange(8)) * LENGTHS).sum()) / 1000
    measurement = measured(line, evaluation(line))
    assert measurement.floor.value.tolist() == pytest.approx([off / float(LENGTHS.sum()), off / 8])
    assert off != 0

"""Claims on entropy at equal reward: the estimate, its error, and when there is none.

The curves are known functions, or small enough to be worked by hand.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml

from rl_training.records.compare.equal_reward import RewardPath, at_equal_reward, entropy_at, path_of
from rl_training.records.compare.final import compare_groups
from rl_training.records.compare.groups import read_groups
from rl_training.records.compare.overlays import draw_overlays
from rl_training.records.compare.sentences import change_in_words, describe
from rl_training.records.table.reading import read_run
from rl_training.records.writer import Records
from rl_training.statistics.estimate import Estimate


def record(folder: Path, rewards: np.ndarray, entropies: np.ndarray, rate: float = 0.1, **config: object) -> Path:
    records = Records(folder / "logs")
    for step, (reward, entropy) in enumerate(zip(rewards, entropies, strict=True), start=1):
        records.write_metrics(step, {"reward": float(reward), "entropy": float(entropy)})
    settings = {"seed": 0, "trainer": {"learning_rate": rate}, **config}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def path(folder: Path, rewards: np.ndarray, entropies: np.ndarray) -> RewardPath:
    found = path_of(read_run(record(folder, rewards, entropies)))
    assert found is not None
    return found


def twin(steps: list[float], rewards: list[float], entropies: list[float], level: float, end: int, length: int):
    """Entropy at `level` and its error, sum by sum, from `length` steps before position `end`."""
    chosen = range(max(end - length, 0), end)
    count = len(chosen)
    t, r, h = (sum(values[k] for k in chosen) / count for values in (steps, rewards, entropies))
    squares = sum((steps[k] - t) ** 2 for k in chosen)
    rise = sum((steps[k] - t) * (rewards[k] - r) for k in chosen) / squares
    fall = sum((steps[k] - t) * (entropies[k] - h) for k in chosen) / squares
    scatter = [entropies[k] - h - fall / rise * (rewards[k] - r) for k in chosen]
    around = sum(e * e for e in scatter)
    phi = sum(before * after for before, after in pairwise(scatter)) / around
    phi = min(max(phi + (2 + 4 * phi) / count, 0.0), 0.8)
    variance = around / (count - 2) * (1 / count + ((level - r) / rise) ** 2 / squares)
    freedom = max(math.floor((count - 2) * (1 - phi) / (1 + phi)), 1)
    return h + fall / rise * (level - r), math.sqrt(variance * (1 + phi) / (1 - phi)), freedom + 1


def test_a_straight_path_is_met_exactly_however_reward_depends_on_time(tmp_path: Path) -> None:
    """H = 1 − 2R along a path that is curved in time: at R = .3 it is .4."""
    rewards = 0.1 + 0.5 * (1 - np.exp(-np.arange(40) / 10))
    found = entropy_at(path(tmp_path, rewards, 1 - 2 * rewards), 0.3)
    assert found.value == pytest.approx(0.4, abs=1e-12)
    assert found.stderr == pytest.approx(0.0, abs=1e-12)


def test_the_estimate_worked_by_hand(tmp_path: Path) -> None:
    """Reward rises by .01 a step from .01; entropy is 1 − R, and .02 more and less than that in turns of two.

    The running mean of 5 steps first reaches .125 with steps 11 to 15 (.13), so the window is steps 6 to 15: r̄ = .105,
    Σ(t − t̄)² = 82.5. Scatter ±.02 in pairs, + in 6, 9, 10, 13 and 14: its mean is 0, and so is Σ(t − t̄)e: pairs
    (6, 7, 8, 9) and (10, 11, 12, 13) cancel, 14 and 15 leave 3.5(.02) − 4.5(.02) = −.02. So b_h = −.01 − .02/82.5.
    """
    steps = np.arange(1, 21)
    signs = np.where(np.isin(steps % 4, (1, 2)), 1.0, -1.0)
    found = entropy_at(path(tmp_path, 0.01 * steps, 1 - 0.01 * steps + 0.02 * signs), 0.125)
    slope = (-0.01 - 0.02 / 82.5) / 0.01
    assert found.value == pytest.approx(0.895 + slope * 0.02)
    around = 10 * 0.0004 - 0.02**2 / 82.5  # what the line leaves of ten squares
    scatter = 0.02 * signs[5:15] + 0.02 / 82.5 * (steps[5:15] - 10.5)
    assert around == pytest.approx(float(scatter @ scatter))
    phi = float(scatter[:-1] @ scatter[1:]) / around
    phi += (2 + 4 * phi) / 10
    assert 8 * (1 - phi) / (1 + phi) == pytest.approx(6.87, abs=0.01)  # degrees of freedom
    variance = around / 8 * (1 / 10 + 0.02**2 / (0.01**2 * 82.5)) * (1 + phi) / (1 - phi)
    assert (found.stderr, found.num_samples) == (pytest.approx(math.sqrt(variance)), 7)


@pytest.mark.parametrize(("noise", "length"), [(0.015, 14), (0.04, 28)], ids=["first window", "grown window"])
def test_the_estimate_is_that_of_a_plain_twin(tmp_path: Path, noise: float, length: int) -> None:
    draw = np.random.default_rng(1)
    rewards = np.linspace(0.1, 0.6, 60) + noise * draw.standard_normal(60)
    entropies = 1 - rewards + 0.03 * draw.standard_normal(60)
    found, level = path(tmp_path, rewards, entropies), 0.4
    end = next(end for end in range(7, 61) if sum(rewards[end - 7 : end]) / 7 >= level)
    value, stderr, num = twin([*range(1, 61)], [*rewards], [*entropies], level, end, length)
    estimate = entropy_at(found, level)
    assert (estimate.value, estimate.stderr) == (pytest.approx(value), pytest.approx(stderr))
    assert estimate.num_samples == num


@pytest.mark.parametrize("kept", [False, True], ids=["entropy follows reward", "entropy falls on at a standing reward"])
def test_the_interval_covers_the_truth_also_where_reward_stands_later(tmp_path: Path, kept: bool) -> None:
    """Reward rises to .5 in half of the run. 200 runs with white noise: 95 % ± 3 % (three standard errors: 4.6 %).

    How much noise with correlation takes away is in the module's docstring.
    """
    draw, steps, covered = np.random.default_rng(2), np.arange(1, 101), 0
    rewards = 0.1 + 0.4 * np.minimum(steps / 50, 1)
    entropies = 1 - 0.008 * steps if kept else 1 - 1.2 * rewards
    true = {False: 1 - 1.2 * 0.42, True: 1 - 0.008 * 40}[kept]
    for _ in range(200):
        noisy = rewards + 0.05 * draw.standard_normal(100), entropies + 0.03 * draw.standard_normal(100)
        found = entropy_at(_path_of(*noisy), 0.42)
        low, high = found.bounds()
        covered += low <= true <= high
    assert 0.90 <= covered / 200 <= 0.99


def _path_of(rewards: np.ndarray, entropies: np.ndarray) -> RewardPath:
    steps, window = np.arange(1.0, len(rewards) + 1), max(5, len(rewards) // 10 // 2 * 2 + 1)
    ones = np.ones(window) / window
    means = (np.convolve(curve, ones, "valid") for curve in (rewards, entropies))
    return RewardPath(steps, rewards, entropies, *means, window)


def test_the_level_is_the_highest_reward_that_both_reach_beyond_noise(tmp_path: Path) -> None:
    """Without noise it is the lower of the highest running means: B ends at the mean of its last five rewards."""
    rising = np.linspace(0.1, 0.9, 40)
    runs = [record(tmp_path / "a", rising, 1 - rising), record(tmp_path / "b", rising / 2, 1 - rising, rate=0.2)]
    equal = at_equal_reward(*(group.members for group in read_groups(runs)))
    assert equal.level == pytest.approx(rising[-5:].mean() / 2)
    assert [e.value for e in equal.entropies] == pytest.approx([1 - equal.level, 1 - 2 * equal.level])
    assert equal.gap.value == pytest.approx(-equal.level)
    noisy = rising + np.where(np.arange(40) % 2, 0.05, -0.05)
    (pair,) = compare_groups(read_groups([record(tmp_path / "c", noisy, 1 - rising, rate=0.3), runs[0]]))
    assert pair.equal_reward.level < 0.8


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (np.linspace(0.1, 0.4, 30), np.linspace(0.5, 0.8, 30), "its reward begins at"),
        (np.linspace(0.1, 0.4, 30), np.full(30, 0.3), "its reward rises too little beside its noise"),
        (np.linspace(0.1, 0.4, 30), np.linspace(0.4, 0.1, 30), "its reward rises too little beside its noise"),
        (np.linspace(0.1, 0.4, 30), np.linspace(0.1, 0.4, 7), "fewer than 8 of its steps"),
    ],
    ids=["no overlap", "constant", "falls", "short"],
)
def test_runs_without_a_reward_in_common_are_not_compared_at_one(
    tmp_path: Path, first: np.ndarray, second: np.ndarray, code: str
) -> None:
    runs = [record(tmp_path / "a", first, 1 - first), record(tmp_path / "b", second, 1 - second, rate=0.2)]
    pairs = compare_groups(read_groups(runs))
    assert math.isnan(pairs[0].equal_reward.gap.value)
    assert pairs[0].equal_reward.gap.reason.startswith(f"b: {code}")
    assert "their entropies cannot be compared at equal reward (b: " in describe(pairs)[0]


def test_seeds_give_the_mean_with_the_error_between_them(tmp_path: Path) -> None:
    """At equal reward, two seeds of A have 1 and 1.2 nats more than 1 − R: mean 1.1, standard error .1."""
    rising = np.linspace(0.1, 0.5, 30)
    runs = [record(tmp_path / f"a{seed}", rising, 2 + 0.2 * seed - rising, seed=seed) for seed in (0, 1)]
    groups = read_groups([*runs, record(tmp_path / "b", rising, 1 - rising, rate=0.2)])
    equal = at_equal_reward(*(group.members for group in groups))
    before = equal.entropies[0]
    assert before.value == pytest.approx(2.1 - equal.level)
    assert (before.stderr, before.num_samples) == (pytest.approx(0.1), 2)
    assert equal.gap.value == pytest.approx(-1.1)


@pytest.mark.parametrize("steps", [4, 15])
def test_a_seed_that_ended_early_neither_prevents_the_comparison_nor_lowers_the_reward(
    tmp_path: Path, steps: int
) -> None:
    """The other two seeds of A go on to step 30, where the figures are."""
    rising = np.linspace(0.1, 0.5, 30)
    runs = [record(tmp_path / f"a{seed}", rising, 2 + 0.2 * seed - rising, seed=seed) for seed in (0, 1)]
    runs.append(record(tmp_path / "b", rising, 1 - rising, rate=0.2))
    (whole,) = compare_groups(read_groups(runs))
    killed = record(tmp_path / "killed", rising[:steps], 3 - rising[:steps], seed=2)
    (pair,) = compare_groups(read_groups([*runs, killed]))
    assert pair.equal_reward == whole.equal_reward


def test_the_sentence_says_both_entropies_at_the_reward_that_both_earn(tmp_path: Path) -> None:
    rising = np.linspace(0.1, 0.5, 30)
    wave = np.where(np.arange(30) % 2, 0.01, -0.01)
    runs = [record(tmp_path / name, rising, 1 - rising - drop + wave, rate)
            for name, drop, rate in (("a", 0.0, 0.1), ("b", 0.2, 0.2))]  # fmt: skip
    (said,) = describe(compare_groups(read_groups(runs)))
    assert said.startswith(
        "B: learning_rate=0.2 against A: learning_rate=0.1: at reward 0.47, B has 0.200 ± 0.014 nats less entropy"
    )
    assert re.search(r"entropy \(0\.3\d+ ± 0\.\d+ against 0\.5\d+ ± 0\.\d+\)\. In the mean of", said)
    assert "In the mean of steps 26–30, B's reward does not" in said
    assert "token entropy" not in said  # at a step, it compares different rewards


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Estimate(-0.06, 0.01, 1000), "is 0.060 ± 0.020 lower"),
        (Estimate(0.06, 0.01, 1000), "is 0.060 ± 0.020 higher"),
        (Estimate(-0.01, 0.01, 1000), "does not detectably differ (0.010 ± 0.020 lower)"),
        (Estimate(-0.06), "is 0.06 lower, without an error bar: more steps or seeds would give one"),
        (Estimate(0.0), "is the same"),
    ],
)
def test_a_difference_in_a_sentence_has_a_size_and_a_side_and_no_sign(change: Estimate, words: str) -> None:
    assert change_in_words(change) == words


def test_runs_of_different_tasks_are_not_compared(tmp_path: Path) -> None:
    rising = np.linspace(0.1, 0.5, 30)
    sums = record(tmp_path / "a", rising, 1 - rising, data={"_target_": "sums"})
    words = record(tmp_path / "b", rising, 1 - rising, data={"_target_": "words"})
    groups = read_groups([sums, words])
    pairs = compare_groups(groups)
    (said,) = describe(pairs)
    assert said.endswith("different tasks (data._target_). Neither their rewards nor their entropies can be compared.")
    assert "path" not in {chart.name for chart in draw_overlays(groups, pairs)}


def test_a_path_that_turns_back_is_drawn_in_the_order_of_its_steps(tmp_path: Path) -> None:
    rewards = np.concatenate([np.linspace(0.1, 0.5, 20), np.linspace(0.5, 0.2, 20)])
    groups = read_groups([record(tmp_path / "a", rewards, np.linspace(1, 0, 40))])
    chart = {chart.name: chart for chart in draw_overlays(groups)}["path"]
    places = chart.data[0]["x"]
    assert places[:5] == sorted(places[:5])
    assert places[-5:] == sorted(places[-5:], reverse=True)
    lines = [layer for layer in chart.spec["layer"][0]["layer"][-1]["layer"] if layer["mark"]["type"] == "line"]
    assert all(layer["mark"]["order"] is False for layer in lines)
    assert chart.data[1]["x"] == [pytest.approx(rewards[-5:].mean(), rel=1e-4)]

"""Claims on benchmarks/step_size_tables.py: its judgement of the bounded step agrees with values worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def line(rule: str, rate: float, seed: int, reward: float, problem: str = "") -> dict[str, Any]:
    place = {"setting": "sums", "rule": rule, "rate": rate, "seed": seed}
    return place | {"reward": reward, "pass8": reward, "problem": problem}


LINES = [
    line("untrained", 0.0, 0, 0.5),
    line("fixed", 1e-3, 0, 0.7), line("fixed", 1e-3, 1, 0.9),  # the best, with mean .8
    line("fixed", 1e-2, 0, 0.44), line("fixed", 1e-2, 1, 0.46),  # one of them has collapsed
    line("bounded", 1e-3, 0, 0.8), line("bounded", 1e-3, 1, 0.8),
    line("bounded", 1e-2, 0, 0.74), line("bounded", 1e-2, 1, 0.7),  # the worst, with mean .72
    line("fixed", 1e-3, 2, 0.6), line("bounded", 1e-1, 2, 0.1),  # a seed of too few rates: in no mean, but collapsed
    line("bounded_1e-2", 1e-3, 1, 0.86), line("bounded_1e-2", 1e-2, 1, 0.9),  # compared with seed 1 only: best .9
]  # fmt: skip


def test_regret_is_against_the_best_fixed_rate_in_the_mean_over_whole_seeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step_size_tables

    rows = []
    for rule in ("bounded", "bounded_1e-2"):
        step_size_tables.print_judgement(LINES, ["sums"], rule, "reward")
        rows.append(capsys.readouterr().out.splitlines()[-1].strip("| "))
    assert rows[0] == "sums | 2 | 8 | 0.500 | 0.800 (0.001) | 0.625 | 0.450 | 1 | 0.760 | 0.720 | 1 | 0.040 | 0.080"
    assert rows[1] == "sums | 1 | 4 | 0.500 | 0.900 (0.001) | 0.680 | 0.460 | 1 | 0.880 | 0.860 | 0 | 0.020 | 0.040"


def test_the_criterion_needs_near_worst_rates_small_regret_and_no_collapse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step_size_tables

    for rule in ("bounded", "bounded_1e-2"):
        step_size_tables.print_verdict(LINES, ["sums"], rule, "reward", "all")
    missed, held = capsys.readouterr().out.splitlines()
    assert missed.endswith("in 0 of 1 settings, mean regret 0.040, 1 collapsed runs: the bar is missed")
    assert held.endswith("in 1 of 1 settings, mean regret 0.020, 0 collapsed runs: the bar holds")


def test_a_tuned_rule_is_the_candidate_with_the_highest_mean_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step_size_rules

    tried = [line("clip_0.01", 1e-3, 0, 0.5), line("clip_0.01", 1e-2, 0, 0.5), line("clip_0.25", 1e-3, 0, 0.9),
             line("clip_0.25", 1e-2, 0, 0.0), line("clip", 1e-3, 0, 1.0)]  # fmt: skip
    assert step_size_rules.rule_of("clip", tried).settings == {"max_grad_norm": 0.01}

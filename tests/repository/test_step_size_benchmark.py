"""Claims on benchmarks/step_size_tables.py: what judges the bounded step is what is worked out by hand."""

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
    line("fixed", 1e-3, 0, 0.7), line("fixed", 1e-3, 1, 0.9),  # the best: .8
    line("fixed", 1e-2, 0, 0.44), line("fixed", 1e-2, 1, 0.46),  # of which one has collapsed
    line("bounded", 1e-3, 0, 0.8), line("bounded", 1e-3, 1, 0.8),
    line("bounded", 1e-2, 0, 0.74), line("bounded", 1e-2, 1, 0.7),  # the worst: .72
    line("bounded", 1e-1, 0, 0.1),  # without a partner: in no mean, but collapsed
]  # fmt: skip


def test_regret_and_worst_start_rate_are_against_the_best_fixed_rate_in_the_mean_over_seeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step_size_tables

    step_size_tables.print_judgement(LINES, ["sums"], "reward")
    row, _, verdict = capsys.readouterr().out.splitlines()[-3:]
    numbers = "sums | 8 | 0.500 | 0.800 (0.001) | 0.625 | 0.450 | 1 | 0.760 | 0.720 | 1 | 0.040 | 0.080"
    assert row.strip("| ") == numbers
    assert "within .05 of the best fixed rate in 0 of 1 settings, mean regret 0.040, 1 collapsed runs" in verdict

"""What stands out in a run's records: at most three lines, each with its evidence, its first step and a setting.

They state what was measured and do not guess at causes. A line that explains others comes before them.
"""

from __future__ import annotations

from collections.abc import Callable

from rl_training.records.report.series import Run
from rl_training.records.report.standing_out import objective, rewards, sampling, steps
from rl_training.records.report.standing_out.line import Line, RunRecords

MAX_LINES = 3
RULES: tuple[Callable[[RunRecords], Line | None], ...] = (
    rewards.jump, steps.too_large, rewards.all_equal, sampling.no_end, sampling.most_cut_off, rewards.hardly_mixed,
    sampling.other_sampler, steps.moves_nothing, objective.reference_wins, objective.bonus_wins,
    steps.follows_noise, rewards.length_with_reward,
)  # fmt: skip


def standing_out(run: Run) -> list[Line]:
    """Return what stands out, explanations first. Of several lines on one setting only the first is kept."""
    records, by_setting = RunRecords.of(run), dict[str, Line]()
    for rule in RULES:
        line = rule(records)
        if line is not None:
            by_setting.setdefault(line.setting, line)
    return list(by_setting.values())[:MAX_LINES]

"""What stands out of a run's records: at most three lines, each with its evidence, its step and the setting.

Statements of what was measured, and no guesses at causes. Where a thing explains others it stands before them.
"""

from __future__ import annotations

from collections.abc import Callable

from rl_training.records.report.series import Run
from rl_training.records.report.standing_out import objective, rewards, sampling, steps
from rl_training.records.report.standing_out.line import Line, Recorded

MOST_LINES = 3
RULES: tuple[Callable[[Recorded], Line | None], ...] = (
    rewards.jump, steps.too_large, rewards.all_equal, sampling.no_end, sampling.most_cut_off, rewards.hardly_mixed,
    sampling.other_sampler, steps.moves_nothing, objective.reference_wins, objective.bonus_wins,
    steps.follows_noise, rewards.length_with_reward,
)  # fmt: skip


def standing_out(run: Run) -> list[Line]:
    """Return what stands out, what explains other things first; of lines about one setting, the first."""
    recorded, by_setting = Recorded.of(run), dict[str, Line]()
    for rule in RULES:
        line = rule(recorded)
        if line is not None:
            by_setting.setdefault(line.setting, line)
    return list(by_setting.values())[:MOST_LINES]

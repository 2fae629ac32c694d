"""What stands out in a run's records: at most three lines, each with its evidence, its first step and a setting.

They state what was measured and do not guess at causes. A line that explains others comes before them.

line.py                                             a line, and the records that rules look at
rewards.py, objective.py, sampling.py, steps.py     the rules
"""

from __future__ import annotations

from collections.abc import Callable

from rl_training.records.report.series import Run, once_per_run
from rl_training.records.report.standing_out import objective, rewards, sampling, steps
from rl_training.records.report.standing_out.line import (
    BONUS,
    CUT_OFF,
    DECAY,
    ENDLESS,
    EQUAL,
    JUMP,
    LARGE_STEP,
    NO_STEP,
    NOISE,
    NOT_A_NUMBER,
    UNMIXED,
    Line,
    RunRecords,
)
from rl_training.records.report.wording import Advice

MAX_LINES = 3
RULES: tuple[Callable[[RunRecords], Line | None], ...] = (
    rewards.not_a_number, rewards.another_reward_falls, objective.decay_wins, objective.bonus_wins, rewards.jump,
    steps.too_large, rewards.all_equal, sampling.no_end, sampling.most_cut_off, rewards.hardly_mixed,
    sampling.other_sampler, steps.moves_nothing, objective.reference_wins, steps.follows_noise,
    rewards.length_with_reward,
)  # fmt: skip
# What a line explains if it came first: the consequences are then left out.
EFFECTS = (LARGE_STEP, EQUAL, UNMIXED, ENDLESS, CUT_OFF, NOISE)
EXPLAINS = {
    NOT_A_NUMBER: (*EFFECTS, NO_STEP), DECAY: EFFECTS, BONUS: EFFECTS, JUMP: EFFECTS, LARGE_STEP: (*EFFECTS, JUMP),
}  # fmt: skip
WHOLE_RUN = (NOT_A_NUMBER, DECAY, BONUS)  # settings and rewards: they come before anything else in the run


@once_per_run
def standing_out(run: Run) -> list[Line]:
    """Return what stands out, explanations first, without what they explain. One line is kept of each advice."""
    records, by_advice = RunRecords.of(run), dict[Advice, Line]()
    for rule in RULES:
        line = rule(records)
        if line is not None and not any(_explains(first, line) for first in by_advice.values()):
            by_advice.setdefault(line.advice, line)
    return list(by_advice.values())[:MAX_LINES]


def _explains(cause: Line, line: Line) -> bool:
    is_later = cause.name in WHOLE_RUN or cause.since < line.since
    return is_later and line.name in EXPLAINS.get(cause.name, ())

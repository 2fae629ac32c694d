"""What stands out in a run's records: at most three lines, each with its evidence, its first step and a setting.

They state what was measured and do not guess at causes. A line that explains others comes before them.

line.py                                             a line, and the records that rules look at
noise.py                                            how noisy rewards are
rewards.py, objective.py, sampling.py, steps.py     the rules
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rl_training.records.report.standing_out import objective, rewards, sampling, steps
from rl_training.records.report.standing_out.line import (
    BONUS,
    CUT_OFF,
    DECAY,
    ENDLESS,
    EQUAL,
    JUMP,
    LARGE_STEP,
    LENGTH,
    LOOPHOLE,
    NO_STEP,
    NOISE,
    NOT_A_NUMBER,
    REFERENCE,
    SAMPLER,
    UNMIXED,
    Line,
    RunRecords,
)
from rl_training.records.report.wording import Advice
from rl_training.records.table.series import Run, once_per_run

MAX_LINES = 3
# Consequences of large or wrong steps: left out if a line explains them.
EFFECTS = (LARGE_STEP, EQUAL, UNMIXED, ENDLESS, CUT_OFF, NOISE)


@dataclass(frozen=True)
class Rule:
    """A rule, and what its line means for the rest of the report.

    Args:
        name: Of its line.
        detect: Returns the line, or None.
        explains: Names of later lines that this one explains. They are left out.
        of_whole_run: Whether it explains them whenever they began: settings and rewards come before all steps.
        cause: Its place among the lines that explain a bad verdict, whose settings come before a change of the loss; 0
            if it explains none.
        is_symptom: Whether it is no cause, but an effect, once reward or entropy was lost.
        precedes_batch_size: Whether it comes before the size of the batch.
    """

    name: str
    detect: Callable[[RunRecords], Line | None]
    explains: tuple[str, ...] = ()
    of_whole_run: bool = False
    cause: int = 0
    is_symptom: bool = False
    precedes_batch_size: bool = False


# In the order in which lines are shown.
RULES = (
    Rule(NOT_A_NUMBER, rewards.not_a_number, (*EFFECTS, NO_STEP), of_whole_run=True, precedes_batch_size=True),
    Rule(LOOPHOLE, rewards.another_reward_falls),
    Rule(DECAY, objective.decay_wins, EFFECTS, of_whole_run=True, cause=1),
    Rule(BONUS, objective.bonus_wins, EFFECTS, of_whole_run=True, cause=2),
    Rule(JUMP, rewards.jump, EFFECTS, cause=4, precedes_batch_size=True),
    Rule(LARGE_STEP, steps.too_large, (*EFFECTS, JUMP), cause=3, precedes_batch_size=True),
    Rule(EQUAL, rewards.all_equal, cause=6, is_symptom=True, precedes_batch_size=True),
    Rule(ENDLESS, sampling.no_end, cause=7),
    Rule(CUT_OFF, sampling.most_cut_off, cause=8),
    Rule(UNMIXED, rewards.hardly_mixed, cause=9, is_symptom=True),
    Rule(SAMPLER, sampling.other_sampler, cause=10),
    Rule(NO_STEP, steps.moves_nothing, cause=5, precedes_batch_size=True),
    Rule(REFERENCE, objective.reference_wins, cause=12),
    Rule(NOISE, steps.follows_noise, cause=11),
    Rule(LENGTH, rewards.length_with_reward),
)
BY_NAME = {rule.name: rule for rule in RULES}


@once_per_run
def standing_out(run: Run) -> list[Line]:
    """Return what stands out, explanations first, without what they explain. One line is kept of each advice."""
    records = RunRecords.of(run)
    by_advice = dict[Advice, Line]()
    for rule in RULES:
        line = rule.detect(records)
        if line is not None and not any(_explains(first, line) for first in by_advice.values()):
            by_advice.setdefault(line.advice, line)
    return list(by_advice.values())[:MAX_LINES]


def rule_of(line: Line) -> Rule:
    """Return the rule that has found a line."""
    return BY_NAME[line.name]


def _explains(cause: Line, line: Line) -> bool:
    rule = rule_of(cause)
    return line.name in rule.explains and (rule.of_whole_run or cause.since < line.since)

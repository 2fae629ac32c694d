"""The verdict that a report opens with: what reward and entropy have done, in one sentence.

STATES is the whole of it: the first state that holds for a run's story is its verdict. Falling reward comes first,
whatever entropy does. docs/how_to/entropy_is_falling.md has this table, with what to do about each state.

    holds.py       when a state holds
    kinds.py       what follows from each kind of verdict
    sentences.py   what is said of it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rl_training.records.pages.writing import percent
from rl_training.records.report.story import Story
from rl_training.records.report.verdict import holds, sentences
from rl_training.records.report.verdict.kinds import (
    ERUPTS,
    FALLEN,
    FLAT,
    FLAT_FALLING,
    GONE,
    HELD_OUT,
    LEARNED,
    LOST,
    PART,
    RISES,
    SOLVED,
    SPENT,
    STEADY,
    UNKNOWN,
    Kind,
)
from rl_training.records.table.series import Run, once_per_run


@dataclass(frozen=True)
class State:
    """A row of the table: when it holds, and the sentence for it.

    Args:
        kind: What follows from it.
        holds: Returns whether it holds.
        headline: The start of its sentence.
        evidence: Returns the rest of it.
        joint: What stands between the two.
    """

    kind: Kind
    holds: Callable[[Story], bool]
    headline: str
    evidence: Callable[[Story], str]
    joint: str = ": "


@dataclass(frozen=True)
class Verdict:
    """What a report says of reward and entropy.

    Args:
        kind: The kind of the state that holds.
        headline, joint, evidence: Its sentence, in its parts.
        since: Step since which it holds; the first logged step if it has no beginning.
        story: What it is based on.
    """

    kind: Kind
    headline: str
    joint: str
    evidence: str
    since: int
    story: Story

    @property
    def sentence(self) -> str:
        return f"{self.headline}{self.joint}{self.evidence}"

    @property
    def nothing_to_do(self) -> str:
        """Why there is nothing to do, "" if there is."""
        return self.kind.nothing_to_do.format(ceiling=percent(holds.ceiling(self.story)))

    @property
    def entropy_is_fine(self) -> str:
        """Why nothing need be done to keep entropy, "" if that is not so."""
        return self.kind.entropy_is_fine or self.nothing_to_do


STATES = (
    State(UNKNOWN, holds.is_short, "What the run does cannot be told yet", sentences.so_far),
    State(FALLEN, holds.reward_fell, "Reward has fallen", sentences.fall, joint=" "),
    State(HELD_OUT, holds.held_out_fell, "Held-out reward has fallen", sentences.held_out_fall, joint=" "),
    State(PART, holds.part_fell, "The reward function {part} has fallen", sentences.part_fall, joint=" "),
    State(SOLVED, holds.was_solved, "Solved from the first step, if the reward is right", sentences.both_curves),
    State(LEARNED, holds.has_learned, "Learned", sentences.both_curves),
    State(SPENT, holds.is_spent, "Entropy is being spent on reward", sentences.both_curves),
    State(RISES, holds.both_rise, "Entropy rises, and so does reward", sentences.both_curves),
    State(STEADY, holds.rises_alone, "Reward rises, and entropy is steady now", sentences.at_its_level, joint=", "),
    State(GONE, holds.is_wasted, "Entropy is gone", sentences.what_is_left, joint=" "),
    State(LOST, holds.is_lost, "Entropy has been lost", sentences.loss, joint=" "),
    State(ERUPTS, holds.has_erupted_for_nothing, "Entropy has risen, and reward has not", sentences.both_curves),
    State(ERUPTS, holds.has_erupted, "Entropy has risen, and reward no longer does", sentences.both_curves),
    State(FLAT, holds.has_hardly_risen, "Reward has hardly risen", sentences.over_all_steps, joint=" "),
    State(
        FLAT_FALLING,
        holds.has_hardly_risen_beside_a_fall,
        "Entropy falls a little, and reward has hardly risen",
        sentences.over_all_steps,
        joint=" ",
    ),
    State(RISES, holds.entropy_rises, "Entropy rises", sentences.both_curves),
    State(STEADY, holds.is_steady, "Entropy is steady now", sentences.at_its_level, joint=", "),
    State(
        UNKNOWN,
        holds.is_any,
        "Whether entropy is being spent on reward or lost cannot be told yet",
        sentences.why_unknown,
    ),
)


@once_per_run
def judge(run: Run) -> Verdict:
    """Return the verdict on reward and entropy up to the last logged step."""
    story = Story.of(run)
    state = next(state for state in STATES if state.holds(story))
    part = holds.fallen_part(story)
    headline = state.headline.format(part=part.name if part else "")
    return Verdict(state.kind, headline, state.joint, state.evidence(story), state.kind.since(story), story)

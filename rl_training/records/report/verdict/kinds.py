"""The kinds of verdicts, and what follows from each. A new kind needs its line in KINDS, and states in STATES.

advice.py has the action of each kind in which something is to be done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rl_training.records.report.story import Story
from rl_training.records.report.verdict import holds

# Of reward:
FALLEN = "fallen"
HELD_OUT = "held_out"  # reward on held-out prompts has fallen
PART = "part"  # one of several reward functions has fallen
SOLVED = "solved"  # from the first step
LEARNED = "learned"
FLAT = "flat"  # it has hardly risen, and entropy does not fall
FLAT_FALLING = "flat_falling"  # it has hardly risen in a long run, and entropy falls by little
# Of entropy:
SPENT = "spent"
GONE = "gone"
LOST = "lost"
ERUPTS = "erupts"
RISES = "rises"
STEADY = "steady"
UNKNOWN = "unknown"


def _first(story: Story) -> int:
    return story.first


def _of_fall(story: Story) -> int:
    return story.reward.since if story.reward else story.first


def _of_held_out(story: Story) -> int:
    return max(story.held_out, key=holds.relative_fall).since


def _of_part(story: Story) -> int:
    part = holds.fallen_part(story)
    return part.since if part else story.first


def _of_gone(story: Story) -> int:
    return story.entropy.since_below(holds.ALMOST_NOTHING) if story.entropy else story.first


def _of_loss(story: Story) -> int:
    reward, entropy = story.reward, story.entropy
    if reward is None or entropy is None:
        return story.first
    return max(reward.line.step_of(reward.stands_from_bin), entropy.highest_at)


@dataclass(frozen=True)
class Kind:
    """What follows from a kind of verdict.

    Args:
        since: The step since which it holds; the first logged step if it has no beginning.
        nothing_to_do: Why there is nothing to do; "" if there is. {ceiling} is the share of the highest reward that
            counts as learned.
        entropy_is_fine: Why nothing need be done to keep entropy, where something else is to be done.
        is_fall: Whether some reward has fallen: a jump of reward explains that, or is no part of it.
        says_no_fall: Whether it says that entropy does not fall, which single steps may contradict.
        leaves_nothing: Whether nothing is left to learn.
        precedes_batch_size: Whether what it calls for comes before the size of the batch.
    """

    since: Callable[[Story], int] = _first
    nothing_to_do: str = ""
    entropy_is_fine: str = ""
    is_fall: bool = False
    says_no_fall: bool = False
    leaves_nothing: bool = False
    precedes_batch_size: bool = False


KINDS = {
    FALLEN: Kind(_of_fall, is_fall=True),
    HELD_OUT: Kind(_of_held_out, is_fall=True),
    PART: Kind(_of_part, is_fall=True),
    SOLVED: Kind(entropy_is_fine="the task was solved from the first step", leaves_nothing=True),
    LEARNED: Kind(nothing_to_do="reward is at {ceiling} or more of its highest possible value", leaves_nothing=True),
    FLAT: Kind(entropy_is_fine="entropy does not fall", says_no_fall=True),
    FLAT_FALLING: Kind(),
    SPENT: Kind(nothing_to_do="entropy that falls while reward rises is no fault"),
    GONE: Kind(_of_gone, precedes_batch_size=True),
    LOST: Kind(_of_loss),
    ERUPTS: Kind(),
    RISES: Kind(nothing_to_do="entropy does not fall", says_no_fall=True),
    STEADY: Kind(nothing_to_do="entropy has no trend in the last quarter of the run", says_no_fall=True),
    UNKNOWN: Kind(nothing_to_do="more steps are needed to tell"),
}

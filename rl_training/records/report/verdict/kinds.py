"""The kinds of verdicts, and what the rest of a report asks about each.

A new kind is an entry here with its answers, and a row of STATES in __init__.py for each state that has it. advice.py
has the action of each kind in which something is to be done.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rl_training.records.report.story import Story
from rl_training.records.report.verdict import holds
from rl_training.records.table.trends import MIN_STEPS


def _first_step(story: Story) -> int:
    return story.first


def _never(story: Story) -> float:
    return math.inf


def _start_of_fall(story: Story) -> int:
    return story.reward.since if story.reward else story.first


def _start_of_held_out_fall(story: Story) -> int:
    return max(story.held_out, key=holds.relative_fall).since


def _start_of_part_fall(story: Story) -> int:
    part = holds.fallen_part(story)
    return part.since if part else story.first


def _when_gone(story: Story) -> int:
    return story.entropy.since_below(holds.ALMOST_NOTHING) if story.entropy else story.first


def _start_of_loss(story: Story) -> int:
    if story.reward is None or story.entropy is None:
        return story.first
    return max(story.reward.flat_since, story.entropy.highest_at)


def _after_fall(story: Story) -> float:
    return _start_of_fall(story) + MIN_STEPS + 1


def _when_largely_lost(story: Story) -> float:
    entropy = story.entropy
    is_largely_lost = entropy is not None and entropy.left < holds.LARGE_LOSS
    return entropy.since_below(holds.LARGE_LOSS) if entropy and is_largely_lost else math.inf


@dataclass(frozen=True)
class Kind:
    """A kind of verdict, and what follows from it.

    Args:
        name: As `rl-training report --json` has it.
        since: Returns the step since which it holds; the first logged step if it has no beginning.
        equal_rewards_from: Returns the step from which on it explains that responses to a prompt earn the same: where
            all of them fail, are right, or are alike. Infinite if it does not explain that.
        nothing_to_do: Why there is nothing to do; "" if there is. {ceiling} is the share of the highest reward that
            counts as learned.
        entropy_is_fine: Why nothing need be done to keep entropy, where something else is to be done.
        is_undecided: Whether it says that more steps are needed to tell.
        is_fall: Whether some reward has fallen: a jump of reward explains that, or is no part of it.
        is_gone: Whether hardly any entropy is left. It was lost earlier than that.
        says_no_fall: Whether it says that entropy does not fall, which single steps may contradict.
        is_learned: Whether nothing is left to learn.
        precedes_batch_size: Whether what it calls for comes before the size of the batch.
        may_come_of_noise: Whether it does so only if the batch is not so small that steps follow noise.
    """

    name: str
    since: Callable[[Story], int] = _first_step
    equal_rewards_from: Callable[[Story], float] = _never
    nothing_to_do: str = ""
    entropy_is_fine: str = ""
    is_undecided: bool = False
    is_fall: bool = False
    is_gone: bool = False
    says_no_fall: bool = False
    is_learned: bool = False
    precedes_batch_size: bool = False
    may_come_of_noise: bool = False


# Of reward:
FALLEN = Kind(
    "fallen",
    since=_start_of_fall,
    equal_rewards_from=_after_fall,
    is_fall=True,
    precedes_batch_size=True,
    may_come_of_noise=True,
)
# Reward on held-out prompts has fallen.
HELD_OUT = Kind("held_out", since=_start_of_held_out_fall, is_fall=True)
# One of several reward functions has fallen.
PART = Kind("part", since=_start_of_part_fall, is_fall=True)
SOLVED = Kind(
    "solved",
    equal_rewards_from=_first_step,
    entropy_is_fine="the task was solved from the first step",
    is_learned=True,
)
LEARNED = Kind("learned", nothing_to_do="reward is at {ceiling} or more of its highest possible value", is_learned=True)
# Reward has hardly risen, and entropy does not fall; or, in a long run, falls by little.
FLAT = Kind("flat", entropy_is_fine="entropy does not fall", says_no_fall=True)
FLAT_FALLING = Kind("flat_falling")
# Of entropy:
SPENT = Kind("spent", nothing_to_do="entropy that falls while reward rises is no fault")
GONE = Kind(
    "gone",
    since=_when_gone,
    equal_rewards_from=_when_largely_lost,
    is_gone=True,
    precedes_batch_size=True,
)
LOST = Kind("lost", since=_start_of_loss, equal_rewards_from=_when_largely_lost)
ERUPTS = Kind("erupts")
RISES = Kind("rises", nothing_to_do="entropy does not fall", says_no_fall=True)
STEADY = Kind("steady", nothing_to_do="entropy has no trend in the last quarter of the run", says_no_fall=True)
UNKNOWN = Kind("unknown", nothing_to_do="more steps are needed to tell", is_undecided=True)

"""When each state of a run holds, and the thresholds for it. They read a story alone.

A story has a curve of reward and one of token entropy, each a broken line (story/broken_line.py), which has decided
what is noise. Here sizes are compared: of reward in standard deviations of single rewards, and in shares of the highest
possible reward where that is known; of entropy in shares of its first level.

Whether a curve falls or rises is decided in story/curves.py. Beyond that,
- entropy is spent if it falls while reward rises;
- it is lost if it falls while reward is flat, and the upper end of what reward has gained meanwhile is below a price:
  MIN_REWARD_GAIN standard deviations for all of the entropy, and in proportion for a share of it;
- it is gone with less than ALMOST_NOTHING left, which is bad below the highest reward;
- it is steady if the largest change that its noise could hide is below STEADY_WITHIN.

Thresholds were chosen by hand. Rules were changed after some curves of benchmarks/stories.py had been seen; its section
in benchmarks/README.md names them, and has how often others are told right.
"""

from __future__ import annotations

import math

from rl_training.records.report.story import Story
from rl_training.records.report.story.curves import FLAT_BAND, MIN_RISE, Reward
from rl_training.records.table.trends import MIN_STEPS

ALMOST_NOTHING = 0.1  # share of the first entropy: with no more left it is gone
MIN_COST_OF_FALL = 0.05  # share of what the others have gained that a fallen part must have cost, each times its weight
MIN_LOSS = 0.1  # share of entropy that must be lost while reward is flat
LARGE_LOSS = 0.5  # likewise; with so much lost, entropy need not fall any more
MIN_REWARD_GAIN = 0.5  # least gain in reward for all of the entropy, in standard deviations
CEILING = 0.8  # of the highest possible reward: learned
CEILING_IF_GONE = 0.9  # likewise; without entropy, what is missing will not be found
ERUPTION = 2.0  # times the first entropy
STEADY_WITHIN = 0.5  # of the level: largest change that the last half may allow for a steady entropy
LONG_RUN = 100  # logged steps of a long run, whose verdict waits for no more steps
MIN_STEPS_TO_RISE = 20  # logged steps that reward must have had before it is said to have hardly risen


def is_short(story: Story) -> bool:
    return all(curve is None or len(curve.line.steps) < MIN_STEPS for curve in (story.reward, story.entropy))


def is_any(story: Story) -> bool:
    return True


def reward_fell(story: Story) -> bool:
    return story.reward is not None and bool(story.reward.fall)


def held_out_fell(story: Story) -> bool:
    return any(reward.fall for reward in story.held_out)


def part_fell(story: Story) -> bool:
    return fallen_part(story) is not None


def relative_fall(reward: Reward) -> float:
    return reward.fall / reward.spread if reward.spread > 0 else 0.0


def fallen_part(story: Story) -> Reward | None:
    """Return the reward function that has fallen furthest, None if none has.

    While the paid sum rises, a paid function that has cost next to nothing of it is no news; one that is watched is.
    """
    candidates = [part for part in story.parts if part.fall and not cost_next_to_nothing(part, story.reward)]
    return max(candidates, key=relative_fall, default=None)


def cost_next_to_nothing(part: Reward, paid: Reward | None) -> bool:
    """Return whether a paid reward function's fall is next to nothing beside what the others have gained."""
    if paid is None or not paid.has_risen or not part.weight > 0:
        return False
    loss = part.weight * part.fall
    return loss < MIN_COST_OF_FALL * (paid.now - paid.start + loss)


def reward_rises(story: Story) -> bool:
    """Return whether reward rises beyond its start; next to nothing for all of the entropy does not count."""
    reward = story.reward
    if reward is None or not reward.rises:
        return False
    if reward.now - max(reward.start, reward.line.start) <= MIN_RISE * reward.spread:
        return False
    return not (is_gone(story) and gained_little(story))


def is_spent(story: Story) -> bool:
    return reward_rises(story) and entropy_falls(story)


def rises_alone(story: Story) -> bool:
    return reward_rises(story) and story.entropy is not None


def both_rise(story: Story) -> bool:
    return reward_rises(story) and entropy_rises(story)


def is_gone(story: Story) -> bool:
    return story.entropy is not None and story.entropy.left < ALMOST_NOTHING


def is_wasted(story: Story) -> bool:
    """Return whether entropy is gone below the highest reward, or, where that is unknown, for next to no reward."""
    is_unbounded = story.reward is None or math.isnan(story.reward.top)
    return is_gone(story) and (not is_unbounded or gained_little(story))


def gained_little(story: Story) -> bool:
    reward = story.reward
    if reward is None:
        return True
    return reward.now - reward.start < max(MIN_REWARD_GAIN * reward.spread, 2 * reward.line.now_error)


def ceiling(story: Story) -> float:
    """Return the share of the highest possible reward from which on a run has learned."""
    return CEILING_IF_GONE if is_gone(story) else CEILING


def has_learned(story: Story) -> bool:
    return story.reward is not None and story.reward.is_at_ceiling(ceiling(story))


def was_solved(story: Story) -> bool:
    """Return whether reward was at its ceiling from the first step on: nothing was left to learn."""
    reward = story.reward
    return reward is not None and has_learned(story) and reward.start >= CEILING * reward.top and not reward.has_risen


def is_lost(story: Story) -> bool:
    """Return whether reward is flat, within what the loss of entropy should have bought, while entropy falls.

    Not if the steps were measured to have raised it, by what may be as much: single batches only hide that.
    """
    reward = story.reward
    entropy = story.entropy
    if reward is None or entropy is None:
        return False
    loss = entropy.lost_since(reward.flat_since)
    price = max(MIN_REWARD_GAIN * loss, FLAT_BAND) * reward.spread
    (low, high) = story.effect_since(reward.flat_since).bounds()
    has_earned_it = low > 0 and high > price
    has_gained_less = reward.largest_gain_while_flat < price and not has_earned_it
    return has_gained_less and (loss > LARGE_LOSS or (entropy.change < 0 and loss > MIN_LOSS))


def has_erupted_for_nothing(story: Story) -> bool:
    """Return whether entropy has risen by far while reward is not above where it was."""
    return has_erupted(story) and (story.reward is None or not _has_risen_since_start(story.reward))


def has_erupted(story: Story) -> bool:
    return story.entropy is not None and story.entropy.left > ERUPTION


def has_hardly_risen(story: Story) -> bool:
    """Return whether reward is where it was in a run long enough, while entropy does not fall."""
    return not entropy_falls(story) and story.logged >= MIN_STEPS_TO_RISE and _is_where_it_was(story.reward)


def has_hardly_risen_beside_a_fall(story: Story) -> bool:
    """Return whether reward is where it was in a long run, while entropy falls, though by too little to be lost."""
    return entropy_falls(story) and story.logged >= LONG_RUN and _is_where_it_was(story.reward)


def _is_where_it_was(reward: Reward | None) -> bool:
    return reward is not None and not reward.rises and not _has_risen_since_start(reward)


def _has_risen_since_start(reward: Reward) -> bool:
    gain = reward.now - max(reward.start, reward.line.start)
    return gain > max(FLAT_BAND * reward.spread, 2 * reward.line.now_error)


def entropy_falls(story: Story) -> bool:
    return story.entropy is not None and story.entropy.change < 0


def entropy_rises(story: Story) -> bool:
    return story.entropy is not None and story.entropy.change > 0


def is_steady(story: Story) -> bool:
    """Return whether entropy has no trend, and a short run's noise could not hide a large one."""
    if story.entropy is None or entropy_falls(story):
        return False
    return story.entropy.reach < STEADY_WITHIN or story.logged >= LONG_RUN

"""The verdict that a report opens with: what reward and entropy have done, in one sentence.

STATES is the whole of it: the first state that holds for a run's story (story.py) is its verdict. Falling reward comes
first, whatever entropy does. advice.py has the action of each state, and docs/how_to/entropy_is_falling.md this table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rl_training.records.report.broken_line import BrokenLine
from rl_training.records.report.series import Run
from rl_training.records.report.story import BAND, NOW, RISE, Entropy, Reward, Story
from rl_training.records.report.trends import MIN_STEPS
from rl_training.records.report.writing import level, percent, plus_minus

FALLEN, HELD_OUT, PART, LEARNED, GONE, LOST = "fallen", "held_out", "part", "learned", "gone", "lost"
SPENT, ERUPTS, RISES, STEADY, UNKNOWN = "spent", "erupts", "rises", "steady", "unknown"
ALMOST_NOTHING = 0.1  # share of the first entropy: with no more left it is gone
NOTABLE = 0.05  # share of what the others have gained that a fallen part must have cost, each times its weight
MIN_LOSS = 0.1  # share of entropy that must be lost while reward is flat
LARGE_LOSS = 0.5  # likewise; with so much lost, entropy need not fall any more
MIN_REWARD_GAIN = 0.5  # least gain in reward for all of the entropy, in standard deviations
CEILING = 0.8  # of the highest possible reward: learned
CEILING_IF_GONE = 0.9  # likewise; without entropy, what is missing will not be found
ERUPTION = 2.0  # times the first entropy
STEADY_WITHIN = 0.5  # of the level: largest change that the last half may allow for a steady entropy
# The kinds in which there is nothing to do, and why.
NOTHING_TO_DO = {
    LEARNED: "reward is at 80% or more of its highest possible value",
    SPENT: "entropy that falls while reward rises is no fault",
    RISES: "entropy does not fall",
    STEADY: "entropy has no trend in the last quarter of the run",
    UNKNOWN: "more steps are needed to tell",
}


@dataclass(frozen=True)
class State:
    """A row of the table: when it holds, and the sentence for it: a headline, and the evidence after it."""

    kind: str
    holds: Callable[[Story], bool]
    headline: str
    evidence: Callable[[Story], str]


@dataclass(frozen=True)
class Verdict:
    """What a report says of reward and entropy.

    Args:
        kind: The kind of the state that holds.
        headline, evidence: Its sentence.
        since: Step since which it holds; the first logged step if it has no beginning.
        story: What it is based on.
    """

    kind: str
    headline: str
    evidence: str
    since: int
    story: Story


def judge(run: Run) -> Verdict:
    """Return the verdict on reward and entropy up to the last logged step."""
    story = Story.of(run)
    state = next(state for state in STATES if state.holds(story))
    part = _fallen_part(story)
    headline = state.headline.format(part=part.name if part else "")
    return Verdict(state.kind, headline, state.evidence(story), _since(state.kind, story), story)


def _since(kind: str, story: Story) -> int:
    reward, entropy = story.reward, story.entropy
    if kind == FALLEN and reward:
        return reward.since
    fallen = {HELD_OUT: story.held_out, PART: story.parts}.get(kind, [])
    if fallen:
        return max(fallen, key=_relative_fall).since
    if kind == GONE and entropy:
        return entropy.since_below(ALMOST_NOTHING)
    if kind == LOST and reward and entropy:
        return max(reward.line.step(reward.stands_from), entropy.highest_at)
    return story.first


# --- when a state holds -----------------------------------------------------------------------------------------------


def _is_short(story: Story) -> bool:
    return all(curve is None or len(curve.line.steps) < MIN_STEPS for curve in (story.reward, story.entropy))


def _is_any(story: Story) -> bool:
    return True


def _reward_fell(story: Story) -> bool:
    return story.reward is not None and bool(story.reward.fall)


def _held_out_fell(story: Story) -> bool:
    return any(reward.fall for reward in story.held_out)


def _part_fell(story: Story) -> bool:
    return _fallen_part(story) is not None


def _relative_fall(reward: Reward) -> float:
    return reward.fall / reward.spread if reward.spread > 0 else 0.0


def _fallen_part(story: Story) -> Reward | None:
    """Return the reward function that has fallen furthest, None if none has.

    While the paid sum rises, a paid function that has cost next to nothing of it is no news; one that is watched is.
    """
    fallen = [part for part in story.parts if part.fall and not is_cheap(part, story.reward)]
    return max(fallen, key=_relative_fall, default=None)


def is_cheap(part: Reward, paid: Reward | None) -> bool:
    """Return whether a paid reward function's fall is next to nothing beside what the others have gained."""
    if paid is None or not paid.has_risen or not part.weight > 0:
        return False
    loss = part.weight * part.fall
    return loss < NOTABLE * (paid.now - paid.start + loss)


def _reward_rises(story: Story) -> bool:
    """Return whether reward rises beyond its start; next to nothing for all of the entropy does not count."""
    reward = story.reward
    if reward is None or not reward.rises:
        return False
    if reward.now - max(reward.start, reward.line.start) <= RISE * reward.spread:
        return False
    return not (_is_gone(story) and _gained_little(story))


def _is_spent(story: Story) -> bool:
    return _reward_rises(story) and _falls(story)


def _rises_alone(story: Story) -> bool:
    return _reward_rises(story) and story.entropy is not None


def _both_rise(story: Story) -> bool:
    return _reward_rises(story) and _rises(story)


def _is_gone(story: Story) -> bool:
    return story.entropy is not None and story.entropy.left < ALMOST_NOTHING


def _is_wasted(story: Story) -> bool:
    """Return whether entropy is gone below the highest reward, or, where that is unknown, for next to no reward."""
    is_unbounded = story.reward is None or math.isnan(story.reward.top)
    return _is_gone(story) and (not is_unbounded or _gained_little(story))


def _gained_little(story: Story) -> bool:
    reward = story.reward
    if reward is None:
        return True
    return reward.now - reward.start < max(MIN_REWARD_GAIN * reward.spread, 2 * reward.line.now_error)


def _has_learned(story: Story) -> bool:
    ceiling = CEILING_IF_GONE if _is_gone(story) else CEILING
    return story.reward is not None and story.reward.is_at_ceiling(ceiling)


def _is_lost(story: Story) -> bool:
    """Return whether reward is flat, within what the loss of entropy should have bought, while entropy falls.

    Not if the steps were measured to have raised it, by what may be as much: single batches only hide that.
    """
    reward, entropy = story.reward, story.entropy
    if reward is None or entropy is None:
        return False
    since = reward.line.step(reward.stands_from)
    lost, (low, high) = entropy.lost_since(since), story.effect_since(since).bounds()
    price = max(MIN_REWARD_GAIN * lost, BAND) * reward.spread
    is_cheap = reward.gain_since(reward.stands_from) < price and not (low > 0 and high > price)
    return is_cheap and (lost > LARGE_LOSS or (entropy.change < 0 and lost > MIN_LOSS))


def _has_erupted(story: Story) -> bool:
    return story.entropy is not None and story.entropy.left > ERUPTION


def _falls(story: Story) -> bool:
    return story.entropy is not None and story.entropy.change < 0


def _rises(story: Story) -> bool:
    return story.entropy is not None and story.entropy.change > 0


def _is_steady(story: Story) -> bool:
    return story.entropy is not None and not _falls(story) and story.entropy.reach < STEADY_WITHIN


# --- what its sentence says -------------------------------------------------------------------------------------------


def _so_far(story: Story) -> str:
    """Say what a run too short for a verdict has logged."""
    few = f"{story.logged} step{'s are' if story.logged > 1 else ' is'} logged, and a verdict needs {MIN_STEPS}"
    few = few if story.logged < MIN_STEPS else f"fewer than {MIN_STEPS} steps have a reward or an entropy"
    units = {"reward": "", "token entropy": " nats"}
    known = {name: levels for name, levels in story.levels.items() if name in units}
    levels = ", ".join(f"{name} {levels.text}{units[name]}" for name, levels in known.items())
    window = next((levels.window for levels in known.values()), "")
    return f": {few}. So far: {levels} ({window})." if known else f": {few}."


def _why_unknown(story: Story) -> str:
    if story.entropy is None and story.starts_without_entropy:
        what = "entropy was 0 from the first step: every response to a prompt is the same"
    elif story.entropy is None:
        what = "too few steps have logged an entropy"
    elif _falls(story):
        what = "entropy falls; whether that buys reward is not certain yet"
    else:
        what = "noise hides whether entropy falls now"
    return f": {what}. {_both(story)}"


def _how_it_fell(reward: Reward) -> str:
    return f"since step {reward.since}: from {level(reward.best)} at its best to {_now(reward)}"


def _fall(story: Story) -> str:
    reward = story.reward
    assert reward is not None
    parts = [f"{part.name} {level(part.best)} → {_now(part)}" for part in story.parts if part.fall]
    of_parts = f" ({'; '.join(parts)})" if parts else ""
    return f" {_how_it_fell(reward)}{of_parts}. {_of_entropy(story.entropy)}"


def _held_out_fall(story: Story) -> str:
    return f" {_how_it_fell(max(story.held_out, key=_relative_fall))}. {_both(story, 'Training reward')}"


def _part_fall(story: Story) -> str:
    part = _fallen_part(story)
    assert part is not None
    others = [f"{other.name} {'rose' if other.has_risen else 'did not'}, {other.levels.text}" for other in story.parts
              if other is not part and not other.fall]  # fmt: skip
    return f" {_how_it_fell(part)}{', while ' * bool(others)}{'; '.join(others)}. {_both(story)}"


def _what_is_left(story: Story) -> str:
    reward, entropy = story.reward, story.entropy
    assert entropy is not None
    said = f" since step {entropy.since_below(ALMOST_NOTHING)}: {share_left(entropy.left)} of the first "
    said += f"{level(entropy.start)} nats is left"
    if reward is None:
        return f"{said}."
    little = "and it bought next to nothing: " if _gained_little(story) else ""
    return f"{said}, {little}reward {reward.levels.text}, {_of_reward_now(reward)}."


def _loss(story: Story) -> str:
    reward, entropy = story.reward, story.entropy
    assert reward is not None
    assert entropy is not None
    since = reward.line.step(reward.stands_from)
    lost = f": {share_left(entropy.lost_since(since))} of what there was then" * (since > story.first)
    return f" since step {since}{lost}, while reward is flat at {_now(reward)}. {_of_entropy(entropy)}"


def _both(story: Story, name: str = "Reward") -> str:
    """Say how far both axes have come over the run, and which way they go now."""
    reward = story.reward
    if reward is None:
        return _of_entropy(story.entropy)
    entropy = _of_entropy(story.entropy)
    return f"{name} {reward.levels.text}, {_of_reward_now(reward)}. {entropy}".strip()


def _of_reward_now(reward: Reward) -> str:
    if reward.fall:
        return "now it has fallen"
    return _now_or_as_a_whole(reward.line, 1, "rises") if reward.rises else "now it is flat"


def _now_or_as_a_whole(line: BrokenLine, sign: float, verb: str) -> str:
    """Say that a curve rises or falls: now, or over the steps of its last piece if the last quarter does not show it.

    Example: "now it rises", "it rises over steps 1–40 as a whole".
    """
    first = line.pieces[-2]
    if line.moves_lately(NOW, sign) or first >= NOW * len(line.fitted):
        return f"now it {verb}"
    return f"it {verb} over steps {line.step(first)}–{line.last} as a whole"


def _after_colon(story: Story) -> str:
    return f": {_both(story)[:1].lower()}{_both(story)[1:]}"


def _at_its_level(story: Story) -> str:
    """Say of a steady entropy how much of it is left, before anything else."""
    reward, entropy = story.reward, story.entropy
    assert entropy is not None
    of_reward = f"reward {reward.levels.text}, {_of_reward_now(reward)}. " if reward else ""
    return f", at {share_left(entropy.left)} of its start: {of_reward}Entropy {entropy.levels.text} nats."


def _of_entropy(entropy: Entropy | None) -> str:
    if entropy is None:
        return ""
    levels = f"Entropy {entropy.levels.text} nats"
    if entropy.left < ALMOST_NOTHING:
        return f"{levels}, almost gone since step {entropy.since_below(ALMOST_NOTHING)}."
    left = f", {share_left(entropy.left)} is left" if entropy.left < 1 else ""
    now = "now it is flat"
    if entropy.change:
        falls = entropy.change < 0
        now = _now_or_as_a_whole(entropy.line, -1 if falls else 1, "falls" if falls else "rises")
    return f"{levels}{left}, {now}."


def _now(reward: Reward) -> str:
    assert reward.levels.now is not None
    return plus_minus(reward.levels.now, 2 * reward.levels.error)


def share_left(share: float) -> str:
    """Return a share in percent, with one digit if it is below one."""
    return percent(share) if share > 0.01 else f"{100 * share:.1g}%"


STATES = (
    State(UNKNOWN, _is_short, "What the run does cannot be told yet", _so_far),
    State(FALLEN, _reward_fell, "Reward has fallen", _fall),
    State(HELD_OUT, _held_out_fell, "Held-out reward has fallen", _held_out_fall),
    State(PART, _part_fell, "The reward function {part} has fallen", _part_fall),
    State(LEARNED, _has_learned, "Learned", _after_colon),
    State(SPENT, _is_spent, "Entropy is being spent on reward", _after_colon),
    State(RISES, _both_rise, "Entropy rises, and so does reward", _after_colon),
    State(STEADY, _rises_alone, "Reward rises, and entropy is steady now", _at_its_level),
    State(GONE, _is_wasted, "Entropy is gone", _what_is_left),
    State(LOST, _is_lost, "Entropy has been lost", _loss),
    State(ERUPTS, _has_erupted, "Entropy has risen, and reward has not", _after_colon),
    State(RISES, _rises, "Entropy rises", _after_colon),
    State(STEADY, _is_steady, "Entropy is steady now", _at_its_level),
    State(UNKNOWN, _is_any, "Whether entropy is being spent on reward or lost cannot be told yet", _why_unknown),
)

"""What a report says of each state of a run: the evidence after its headline, without the mark or space between."""

from __future__ import annotations

from rl_training.records.pages.writing import capitalized, format_level, percent, share_left, uncapitalized
from rl_training.records.report.story import Story
from rl_training.records.report.story.broken_line import BrokenLine
from rl_training.records.report.story.curves import NOW, Entropy, Reward
from rl_training.records.report.verdict import holds
from rl_training.records.report.verdict.holds import ALMOST_NOTHING, STEADY_WITHIN
from rl_training.records.table.trends import MIN_STEPS

NO_ENTROPY = "entropy was 0 from the first step: every response to a prompt is the same"


def so_far(story: Story) -> str:
    """Say what a run too short for a verdict has logged."""
    few = f"fewer than {MIN_STEPS} steps have a reward or an entropy"
    if story.logged < MIN_STEPS:
        few = f"{story.logged} step{'s are' if story.logged > 1 else ' is'} logged, and a verdict needs {MIN_STEPS}"
    reward = story.reward_levels
    entropy = story.entropy_levels
    first = reward or entropy
    if first is None:
        return f"{few}."
    texts = [f"reward {reward.text}" if reward else "", f"token entropy {entropy.text} nats" if entropy else ""]
    return f"{few}. So far: {', '.join(filter(None, texts))} ({first.window.text})."


def why_unknown(story: Story) -> str:
    if story.entropy is None and story.starts_without_entropy:
        what = NO_ENTROPY
    elif story.entropy is None:
        what = "too few steps have logged an entropy"
    elif holds.entropy_falls(story):
        what = "entropy falls; whether that buys reward is not certain yet"
    else:
        what = _noise_hides(story.entropy)
    return f"{what}. {_describe_curves(story)}"


def fall(story: Story) -> str:
    reward = story.reward
    assert reward is not None
    parts = [f"{part.name} {format_level(part.best)} → {part.levels.text_now}" for part in story.parts if part.fall]
    fallen_parts = f" ({'; '.join(parts)})" if parts else ""
    return f"{_describe_fall(reward)}{fallen_parts}. {_describe_entropy(story.entropy)}"


def held_out_fall(story: Story) -> str:
    largest = max(story.held_out, key=holds.relative_fall)
    return f"{_describe_fall(largest)}. {_describe_curves(story, 'Training reward')}"


def part_fall(story: Story) -> str:
    part = holds.fallen_part(story)
    assert part is not None
    others = [f"{other.name} {'rose' if other.has_risen else 'did not'}, {other.levels.text}" for other in story.parts
              if other is not part and not other.fall]  # fmt: skip
    while_others = f", while {'; '.join(others)}" if others else ""
    return f"{_describe_fall(part)}{while_others}. {_describe_curves(story)}"


def what_is_left(story: Story) -> str:
    reward = story.reward
    entropy = story.entropy
    assert entropy is not None
    sentence = f"since step {entropy.since_below(ALMOST_NOTHING)}: {share_left(entropy.left)} of the first "
    sentence += f"{format_level(entropy.start)} nats is left"
    if reward is None:
        return f"{sentence}."
    little = "and it bought next to nothing: " if holds.gained_little(story) else ""
    return f"{sentence}, {little}reward {reward.levels.text}, {_reward_now(reward)}."


def loss(story: Story) -> str:
    reward = story.reward
    entropy = story.entropy
    assert reward is not None
    assert entropy is not None
    since = reward.flat_since
    share = f": {share_left(entropy.lost_since(since))} of what there was then" if since > story.first else ""
    return f"since step {since}{share}, while reward is flat at {reward.levels.text_now}. {_describe_entropy(entropy)}"


def both_curves(story: Story) -> str:
    return uncapitalized(_describe_curves(story))


def over_all_steps(story: Story) -> str:
    """Say that reward is where it was, and after how many steps."""
    reward = story.reward
    assert reward is not None
    entropy = f"{capitalized(NO_ENTROPY)}." if story.starts_without_entropy else _describe_entropy(story.entropy)
    return f"in {story.last - story.first + 1} steps: {reward.levels.text}. {entropy}".rstrip()


def at_its_level(story: Story) -> str:
    """Say of a steady entropy how much of it is left, before anything else."""
    reward = story.reward
    entropy = story.entropy
    assert entropy is not None
    reward_text = f"reward {reward.levels.text}, {_reward_now(reward)}. " if reward else ""
    remark = f" ({_noise_hides(entropy)})" if entropy.reach >= STEADY_WITHIN else ""
    return f"at {share_left(entropy.left)} of its start: {reward_text}Entropy {entropy.levels.text} nats{remark}."


def _noise_hides(entropy: Entropy) -> str:
    """Say how large a change of entropy its noise could hide."""
    size = percent(entropy.reach) if entropy.reach < 1 else "as much as its level"
    return f"noise could hide a change by {size}"


def _describe_curves(story: Story, name: str = "Reward") -> str:
    """Say how far both axes have come over the run, and which way they go now."""
    reward = story.reward
    if reward is None:
        return _describe_entropy(story.entropy)
    entropy = _describe_entropy(story.entropy)
    return f"{name} {reward.levels.text}, {_reward_now(reward)}. {entropy}".strip()


def _describe_fall(reward: Reward) -> str:
    return f"since step {reward.since}: from {format_level(reward.best)} at its best to {reward.levels.text_now}"


def _reward_now(reward: Reward) -> str:
    if reward.fall:
        return "now it has fallen"
    return _direction(reward.line, 1, "rises") if reward.rises else "now it is flat"


def _describe_entropy(entropy: Entropy | None) -> str:
    if entropy is None:
        return ""
    levels = f"Entropy {entropy.levels.text} nats"
    if entropy.left < ALMOST_NOTHING:
        return f"{levels}, almost gone since step {entropy.since_below(ALMOST_NOTHING)}."
    remainder = f", {share_left(entropy.left)} is left" if entropy.left < 1 else ""
    now = "now it is flat"
    if entropy.change:
        falls = entropy.change < 0
        now = _direction(entropy.line, -1 if falls else 1, "falls" if falls else "rises")
    return f"{levels}{remainder}, {now}."


def _direction(line: BrokenLine, sign: float, verb: str) -> str:
    """Say that a curve rises or falls: now, or over the steps of its last piece if the last quarter does not show it.

    Example: "now it rises", "it rises over steps 1–40 as a whole".
    """
    first = line.pieces[-2]
    if line.moves_lately(NOW, sign) or first >= NOW * len(line.fitted):
        return f"now it {verb}"
    return f"it {verb} over steps {line.step_of(first)}–{line.last} as a whole"

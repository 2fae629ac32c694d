"""What stands out in the objective: weight decay, the KL term or the entropy bonus outweighs the reward."""

from __future__ import annotations

import math

from rl_training.records.pages.writing import format_estimate, milli, steps_of
from rl_training.records.report.standing_out.line import BONUS, DECAY, REFERENCE, Line, RunRecords, recent
from rl_training.records.report.story.broken_line import broken_line
from rl_training.records.report.wording import rounded
from rl_training.records.table.trends import MIN_STEPS, mean_of_recent
from rl_training.statistics.welch import is_significant, mean_of

MIN_ALLOWED_GAIN = 0.25  # least gain that the KL term must allow, in standard deviations of the reward
MIN_ENTROPY_RISE = 0.25  # least rise of entropy for a bonus to win, as a share of its initial level
MIN_DECAY_OF_ENTROPY = 0.01  # of the level, by a step
MIN_SHRINKAGE = 0.2  # share of the weights that decay takes away over the run


def decay_wins(records: RunRecords) -> Line | None:
    """Report weight decay that moves entropy more than the gradients do, or takes a notable part of the weights."""
    weight = records.set_up.number("weight_decay", records.set_up.optimizer("weight_decay"))
    rates = records.rates
    shrinkage = 1 - math.exp(-weight * float(rates.sum())) if weight > 0 and len(rates) else 0.0
    parts = {name: recent(records.run.values(f"delta_h/part/{name}")) for name in ("decay", "momentum", "gradient")}
    by_decay = mean_of([float(value) for value in parts["decay"]])
    others = sum(abs(float(part.mean())) for name, part in parts.items() if name != "decay" and len(part))
    level = float(records.run.token_entropy().tail(MIN_STEPS).mean())
    wins = is_significant(by_decay) and abs(by_decay.value) > max(others, MIN_DECAY_OF_ENTROPY * level)
    if not weight > 0 or not (wins or shrinkage > MIN_SHRINKAGE):
        return None
    evidence = f"Weight decay wins: weight_decay={weight:g} has taken {100 * shrinkage:.0f}% of the weights"
    evidence += f", and moves entropy by {milli(by_decay)} thousandths of a nat a step" if wins else ""
    smaller = records.wording.fields(weight_decay=0 if weight > 1 else rounded(weight / 10))
    return Line(DECAY, records.run.steps[0], f"{evidence}.", smaller)


def reference_wins(records: RunRecords) -> Line | None:
    """Report a KL term that allows next to no gain in reward.

    If the KL of a response is weighted by beta, the best policy gains about Var(A)/beta of the advantage A. Var(A) is 1
    if rewards are divided by their spread, otherwise it is the spread squared.
    """
    beta = records.set_up.number("beta", 0.0)
    spread = float(records.spread.mean()) if len(records.spread) else 0.0
    if not beta > 0 or len(records.reward) < MIN_STEPS or records.reward_rise.bounds()[0] > 0 or not spread > 0:
        return None
    scaled = str(records.set_up.trainer("scale_rewards", "group")).lower() not in ("none", "false")
    gain = (1.0 if scaled else spread) / beta  # in standard deviations of the reward
    if gain >= MIN_ALLOWED_GAIN:
        return None
    kl = mean_of_recent(records.run.logged("kl"))
    distance = f"; KL to the first model is {format_estimate(kl)} nats per token" if math.isfinite(kl.value) else ""
    evidence = (
        f"The KL term wins: with beta={beta:g} reward can gain some {gain * spread:.2g} in all. It has changed by "
        f"{format_estimate(records.reward_rise, signed=True)} over {steps_of(records.reward)}{distance}."
    )
    smaller = float(f"{beta * gain / 10:.1g}")
    return Line(REFERENCE, int(records.reward.index[0]), evidence, records.wording.fields(beta=smaller))


def bonus_wins(records: RunRecords) -> Line | None:
    """Report an entropy bonus that raises entropy while reward does not rise."""
    weight = records.set_up.number("entropy_coef", 0.0)
    levels = records.run.token_entropy()
    line = broken_line(levels)
    if not weight > 0 or line is None or len(levels) < MIN_STEPS or records.reward_rise.bounds()[0] > 0:
        return None
    if not line.rise.bounds()[0] > MIN_ENTROPY_RISE * max(line.start, float(levels.head(3).mean())):
        return None
    # How small a bonus must be is not known; docs/how_to/entropy_rises.md has a small one that failed.
    evidence = (
        f"The entropy bonus wins: with entropy_coef={weight:g} entropy has risen by {format_estimate(line.rise)} "
        f"nats, and reward has changed by {format_estimate(records.reward_rise, signed=True)}, over {steps_of(levels)}."
    )
    return Line(BONUS, int(levels.index[0]), evidence, records.wording.fields(entropy_coef=0))

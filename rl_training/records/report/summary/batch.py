"""Rows on the batch: would another size pay, and how much of it carries the update?

Thresholds were chosen by hand. The number of steps is in proportion to 1 + 1/r, with r the batch over the noise scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rl_training.records.pages.writing import MISSING, percent, steps_of
from rl_training.records.report.standing_out import rule_of, standing_out
from rl_training.records.report.standing_out.finding import NOISE
from rl_training.records.report.standing_out.rewards import FEW_MIXED
from rl_training.records.report.summary.row import Row, how_to
from rl_training.records.report.verdict import Verdict
from rl_training.records.table.estimates import last_of
from rl_training.records.table.series import Run
from rl_training.records.table.trends import RECENT

FITTING_BATCH_RATIO = (0.5, 2.0)  # batch over noise scale: outside of this range another batch size pays
# Of another batch, as a factor on the present one.
LARGER = 2.0  # or more, up to the lower end of the noise scale
SMALLER = 0.5


def noise_scale(run: Run, verdict: Verdict) -> Iterator[Row]:
    """Yield the row on the noise scale, and on the batch that it calls for where there is something left to learn."""
    scale = last_of(run.with_interval("gns/noise_scale_prompts"))
    ratio = last_of(run.with_interval("gns/batch_ratio"))
    if scale is None:
        return
    see = how_to("batch_size")
    if not scale.interval:
        value = MISSING if math.isnan(scale.value) else f"{scale.value:.0f} prompts"
        yield Row("noise scale", value, scale.reason, see)
        return
    low, high = scale.interval
    value = f"{scale.value:.0f} ({low:.0f} … {high:.0f}) prompts"
    if math.isinf(high):
        value = "unbounded" if math.isinf(low) else f"above {low:.0f} prompts"
    advice = _nothing_to_gain(run, verdict) or _batch_size(ratio.interval if ratio else None, scale.interval)
    yield Row("noise scale", value, f"95 %; {advice}", see)


def _nothing_to_gain(run: Run, verdict: Verdict) -> str:
    """Return why no batch is called for: nothing is left to learn, or something else is in the way of it; else ""."""
    mixed = 1 - run.logged("frac_reward_zero_std").tail(RECENT).mean()
    findings = standing_out(run)
    is_noisy = any(finding.name == NOISE for finding in findings)
    kind_precedes = verdict.kind.precedes_batch_size and not (verdict.kind.may_come_of_noise and is_noisy)
    if kind_precedes or any(rule_of(finding).precedes_batch_size for finding in findings):
        return "what the first lines say comes before the size of the batch"
    if verdict.kind.is_learned:
        return "it grows as the reward's highest value is reached, and calls for no other batch"
    if mixed < FEW_MIXED:
        return f"only {percent(mixed)} of the prompts have unequal rewards: that calls for other prompts"
    return ""


def _batch_size(ratio: tuple[float, float] | None, scale: tuple[float, float]) -> str:
    """Say what a batch would save that the whole interval calls for: at least twice the present one, or half of it.

    Args:
        ratio: 95 % interval of batch size over noise scale.
        scale: 95 % interval of the noise scale, in prompts.
    """
    if ratio is None:
        return "whether another batch size pays is not known yet"
    low, high = (max(end, 0.0) for end in ratio)
    comparison = f"the batch is {low:.2f} to {high:.2f} of it"
    if low >= FITTING_BATCH_RATIO[0] and high <= FITTING_BATCH_RATIO[1]:
        return f"{comparison}: it is about right; beyond it gains shrink"
    batch = low * scale[1] if math.isfinite(scale[1]) else high * scale[0]  # in prompts
    if high < 1:
        times = max(LARGER, 1 / high) if high > 0 else LARGER
    elif low > 1:
        times = SMALLER
    else:
        return f"{comparison}: it may be too small or too large; more steps will tell"
    size = f"{times * batch:.0f} prompts a step" if math.isfinite(times * batch) else "twice the batch"
    steps = [_steps_needed(end, times) for end in (low, high)]
    responses = [times * factor for factor in steps]
    num_steps = _more_or_fewer(steps, "steps")
    num_responses = _more_or_fewer(responses, "responses")
    return f"{comparison}: {size} would take about {num_steps} and {num_responses}"


def _more_or_fewer(factors: Sequence[float], of: str) -> str:
    """Return a range of factors as percent more or fewer, such as "15 to 24 % fewer steps"."""
    low, high = sorted(abs(round(100 * (factor - 1))) for factor in factors)
    if high == 0:
        return f"as many {of}"
    word = "more" if sum(factors) > len(factors) else "fewer"
    return f"{low} % {word} {of}" if low == high else f"{low} to {high} % {word} {of}"


def _steps_needed(ratio: float, times: float) -> float:
    """Return by what factor the number of steps changes with a batch of `times` its size.

    Steps are in proportion to 1 + 1/r, where r is the batch over the noise scale (docs/how_to/batch_size.md).

    >>> round(_steps_needed(0.5, 2), 2), round(_steps_needed(2.0, 0.5), 2)
    (0.67, 1.33)
    """
    return (ratio + 1 / times) / (ratio + 1)


def effective_sample(run: Run) -> Iterator[Row]:
    """Yield the row on how many sequences carry the update."""
    if run.rows("ess/advantage").empty:
        return
    shares = run.values("ess/advantage_fraction").tail(RECENT)
    idle = run.values("ess/zero_advantage_prompts").tail(RECENT)
    at = f", mean of {steps_of(shares)}" if len(shares) else ""
    note = f"of the sequences carry the update (Kish size of |A|{at})"
    if len(idle):
        note += f"; {percent(idle.mean())} of the prompts have zero advantage: all their rewards are equal"
    yield Row("effective sample", percent(shares.mean()) if len(shares) else MISSING, note)

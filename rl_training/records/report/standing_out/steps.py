"""What stands out in the steps: they move nothing, are too large, or follow noise."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from rl_training.records.pages.writing import format_estimate, milli, steps_of
from rl_training.records.report.standing_out.line import (
    LARGE_STEP,
    NO_STEP,
    NOISE,
    Line,
    RunRecords,
    in_percent,
    recent,
)
from rl_training.records.report.standing_out.noise import MIN_JUMP_STDERRS, fall_as_if_by_lot, noise_of_a_step
from rl_training.records.report.wording import Advice, rounded
from rl_training.records.table.estimates import by_about_step, last_of, to_estimates
from rl_training.records.table.measured import of_one_step
from rl_training.records.table.rates import forward_and_backward, predictions_disagree
from rl_training.records.table.trends import MIN_STEPS, first_of_trailing, line_through, mean_of_recent, share_of
from rl_training.statistics.welch import mean_of

MIN_REWARD_MOVE = 0.02  # of the reward's range: steps that all together move it less move nothing
MIN_SURVIVING_SHARE = 0.5  # share of a step that must survive rounding
TOO_FAR = 0.1  # a step's KL over entropy, both per token; ten times target_kl_share="auto"
LEFT = 0.5  # ESS as a share of the sequences; with less there is no estimate
MIN_KL_OF_RESPONSE = 0.05  # KL per response, in nats, below which no step counts as large
MIN_FAR_SHARE = 0.2  # share of steps
MIN_BREAK = 0.2  # standard deviations of the rewards that one step must have cost
MIN_OF_LARGEST = 0.2  # of the largest KL: where other steps moved far more, no single one is to blame
AROUND = 4  # steps averaged before and after a step
BEST = 3  # steps that the best reward averages
MIN_STDERRS_BELOW_BEST = 4.0  # standard errors that reward has fallen below its best
MIN_REWARD_LOSS = 0.5  # share of the best reward that is gone
MIN_ENTROPY_CHANGE = 0.5  # share by which entropy changes after the best step
MAX_BATCH_RATIO = 0.25  # batch over noise scale
MAX_REWARD_GAIN = 0.25  # standard deviations of the reward: if it may have gained more, it may be learning
SHORT_WARM_UP = 0.1  # of the steps of a run: what is advised instead of one that goes on
STEPS_OF_NOISE = 12  # logged steps that reward must have had to rise


def moves_nothing(records: RunRecords) -> Line | None:
    """Report steps that hardly move the policy, with the recorded reasons."""
    return _no_rate(records) or _lost_to_rounding(records) or _hardly_moves(records)


def _lost_to_rounding(records: RunRecords) -> Line | None:
    shares = records.run.values("update/surviving_share")
    if (
        len(shares) < min(3, len(records.run.steps))
        or not len(shares)
        or not recent(shares).mean() < MIN_SURVIVING_SHARE
    ):
        return None
    left = mean_of_recent(shares)
    evidence = f"Rounding to the weights' dtype leaves {format_estimate(left)} of a step."
    since = first_of_trailing(shares < MIN_SURVIVING_SHARE) or int(shares.index[0])
    more = Advice("weights in float32 (bf16=True computes in bf16), or a higher learning_rate")
    return Line(NO_STEP, since, evidence, more)


def _hardly_moves(records: RunRecords) -> Line | None:
    """Report it by the steps' KL: √(½ (Σ √KL)²) bounds a reward's total change, as a share of its range (Pinsker)."""
    kl, length = of_one_step(records.run, "measured/kl")["value"].align(records.length, join="inner")
    if len(kl) < MIN_STEPS:
        return None
    of_responses = (kl * length).clip(lower=0.0)
    most = math.sqrt(0.5) * float(np.sqrt(of_responses).sum())
    if most >= MIN_REWARD_MOVE or (records.mixed.reindex(kl.index) == 0).all():
        return None
    evidence = (
        f"The steps move nothing: KL is {format_estimate(mean_of(list(of_responses)))} nats per response and step, and "
        f"all {len(kl)} together can have changed the mean reward by {most:.2g} of its range at most."
    )
    return Line(NO_STEP, int(kl.index[0]), f"{evidence} {_why_so_little(records)}", _more(records))


def _no_rate(records: RunRecords) -> Line | None:
    """Report a learning rate of 0, or next to 0 beside the highest that was logged or set."""
    rates = records.run.logged("learning_rate")
    highest = max(records.set_up.number("learning_rate", 0.0), float(rates.max()) if len(rates) else 0.0)
    now = recent(rates)
    if len(now) < min(MIN_STEPS, len(records.run.steps)) or now.empty or now.max() > 1e-6 * highest:
        return None
    since = first_of_trailing(rates <= now.max()) or int(now.index[0])
    evidence = f"The learning rate is {now.max():.2g} ({steps_of(now)}): the steps move nothing."
    warm_up = _long_warm_up(records)
    if warm_up is not None:
        evidence += f" {warm_up[0]}"
        setting = warm_up[1]
    else:
        setting = Advice(f"{records.wording.rate_name}, its schedule and warm-up")
    return Line(NO_STEP, since, evidence, setting, "Nothing is trained")


def _long_warm_up(records: RunRecords) -> tuple[str, Advice] | None:
    """Return how far the run is in its warm-up, and a shorter one; None if it is past the warm-up, or has none."""
    set_up = records.set_up
    last = records.run.steps[-1]
    warm_up = set_up.number("warmup_steps", 0.0)
    planned = set_up.number("max_steps", 0.0)
    planned = planned if planned > 0 else last  # TRL: −1 if epochs decide
    share = max(warm_up if warm_up < 1 else 0.0, set_up.number("warmup_ratio", 0.0))
    length = warm_up if warm_up >= 1 else share * planned
    if not length > last:
        return None
    sentence = f"The warm-up takes {length:.0f} steps, and {last} are done."
    shorter = max(1, round(SHORT_WARM_UP * planned))
    if length <= shorter:
        return sentence, Advice.to_do(f"Wait until step {length:.0f}, where the warm-up ends.")
    return sentence, records.wording.fields(warmup_steps=shorter)


def _why_so_little(records: RunRecords) -> str:
    rate, norm = records.run.logged("learning_rate"), records.run.logged("grad_norm")
    clip = records.set_up.number("max_grad_norm")
    parts = []
    if len(rate):
        parts.append(f"the learning rate is {rate.iloc[-1]:.2g}")
    if len(norm) and 0 < clip < 0.5 * norm.median():
        parts.append(f"clipping leaves {clip / norm.median():.2g} of the gradient (norm {norm.median():.2g})")
    trained = records.set_up.trained_parameters
    if trained is not None:
        parts.append(f"{trained:,} parameters are trained")
    sentence = f"{', '.join(parts).capitalize()}." if parts else ""
    warm_up = _long_warm_up(records)
    return sentence if warm_up is None else f"{sentence} {warm_up[0]}"


def _more(records: RunRecords) -> Advice:
    warm_up = _long_warm_up(records)
    if warm_up is not None:
        return warm_up[1]
    norm = records.run.logged("grad_norm")
    clip = records.set_up.number("max_grad_norm")
    if str(records.set_up.trainer("optim", "")).startswith("sgd") and len(norm) and 0 < clip < 0.5 * norm.median():
        return records.wording.fields(max_grad_norm=rounded(norm.median()))
    if records.set_up.is_bounded:
        return records.wording.bounded_step(times=3.0).followed_by(", or more trained parameters")
    others = ", which adapts the rate; or a higher learning_rate, or more trained parameters"
    return records.wording.bounded_step().followed_by(others)


def too_large(records: RunRecords) -> Line | None:
    """Report steps that are too large: by how far they move the policy, by forward against backward, or by reward."""
    return (
        _one_broke_it(records)
        or _one_is_beyond_all(records)
        or _too_far(records)
        or _first_order_fails(records)
        or _reward_is_gone(records)
    )


def _moved(records: RunRecords) -> tuple[pd.DataFrame, pd.Series[float]]:
    """Return the rows of each step's KL and the entropy of the policy before it, both by the step that moved."""
    kl = by_about_step(of_one_step(records.run, "measured/kl"))
    return kl, records.run.token_entropy().reindex(kl.index)


def _is_far(records: RunRecords) -> pd.Series[bool]:
    """Return whether each step moved the policy far: beside its entropy, or so that few sequences still describe it."""
    rows, entropy = _moved(records)
    left = records.run.values("measured/ess").reindex(of_one_step(records.run, "measured/kl").index).to_numpy()
    of_responses = rows["value"] * records.length.reindex(rows.index).fillna(0.0)
    return (rows["value"] > TOO_FAR * entropy.clip(lower=1e-12)) & (of_responses > MIN_KL_OF_RESPONSE) | (left < LEFT)


def _one_broke_it(records: RunRecords) -> Line | None:
    """Report one step that moved the policy far, and after which reward was lower than before."""
    rows, entropy = _moved(records)
    far = _is_far(records)
    far &= (rows["value"] >= MIN_OF_LARGEST * rows["value"].max()) | (rows["value"] > entropy)
    for step in rows.index[far.to_numpy()]:
        before = records.reward[records.reward.index <= step].tail(AROUND)
        after = records.reward[records.reward.index > step].head(AROUND)
        fall = before.mean() - after.mean()
        noise = noise_of_a_step(records)
        if len(after) < 2 or not fall > max(
            MIN_JUMP_STDERRS * noise / math.sqrt(len(after)), MIN_BREAK * records.largest_spread
        ):
            continue
        evidence = (
            f"One step was too large: step {step} moved the policy by {rows['value'][step]:.2g} nats per token (KL, "
            f"with an entropy of {entropy[step]:.2g}), and reward went from {before.mean():.3f} ({steps_of(before)}) "
            f"to {after.mean():.3f} ({steps_of(after)})."
        )
        return Line(LARGE_STEP, int(step), evidence, records.wording.bounded_step())
    return None


def _one_is_beyond_all(records: RunRecords) -> Line | None:
    """Report one step whose KL exceeded all of the policy's entropy."""
    kl, entropy = _moved(records)
    beyond = kl["low"] > entropy.clip(lower=1e-12)
    beyond &= kl["value"] * records.length.reindex(kl.index).fillna(0.0) > 1.0  # above one nat per response
    if not beyond.any():
        return None
    step = int(kl.index[beyond.to_numpy()][0])
    moved = to_estimates(kl)[step]
    evidence = (
        f"A step is too large: step {step} moved the policy by {format_estimate(moved)} nats per token (KL), and its "
        f"entropy was {entropy[step]:.2g}."
    )
    return Line(LARGE_STEP, step, evidence, records.wording.bounded_step())


def _too_far(records: RunRecords) -> Line | None:
    """Report that many steps moved the policy far."""
    kl = _moved(records)[0]["value"]
    far = _is_far(records)
    if len(kl) < MIN_STEPS:
        return None
    share = share_of(int(far.sum()), len(far))
    if not share.bounds()[0] > MIN_FAR_SHARE:
        return None
    evidence = (
        f"Steps are too large: {in_percent(share)} of them moved the policy by more than {TOO_FAR:g} of its entropy, "
        f"or so far that less than half of the sequences' weight is left. KL is {kl.median():.2g} nats per token in "
        "the median."
    )
    since = int(far.index[far.to_numpy()][0])
    return Line(LARGE_STEP, since, evidence, records.wording.bounded_step())


def _first_order_fails(records: RunRecords) -> Line | None:
    predictions = forward_and_backward(records.run)
    if predictions is None or not predictions_disagree(records.run):
        return None
    forward, half = predictions
    evidence = (
        f"Steps are too large for first order: half of forward − backward is {milli(half)} thousandths of a nat, of a "
        f"forward of {milli(forward)}, the mean over the last steps."
    )
    since = int(recent(records.run.values("delta_h/forward")).index[0])
    return Line(LARGE_STEP, since, evidence, records.wording.bounded_step())


def _reward_is_gone(records: RunRecords) -> Line | None:
    """Report that reward fell for good, and entropy changed by half or more as it did, if no step's KL is recorded."""
    reward = records.reward
    levels = records.run.token_entropy()
    if len(of_one_step(records.run, "measured/kl")) or len(reward) < MIN_STEPS or not records.set_up.sequences > 0:
        return None
    end = reward.tail(MIN_STEPS)
    highest = float(reward.rolling(BEST, min_periods=1).mean().max())
    good = reward.index[(reward >= 0.5 * highest + 0.5 * end.mean()).to_numpy()]
    if good.empty:
        return None
    best = int(good[-1])
    top = reward[reward.index <= best].tail(BEST)
    noise = 2 * records.largest_spread / math.sqrt(records.set_up.sequences) or noise_of_a_step(records)
    fall = float(top.mean() - end.mean())
    before, after = levels[levels.index <= best].tail(BEST).mean(), levels[levels.index > best].head(BEST).mean()
    turned = before > 0 and abs(after / before - 1) > MIN_ENTROPY_CHANGE
    if not (fall > MIN_STDERRS_BELOW_BEST * noise and fall > MIN_REWARD_LOSS * float(top.mean()) and turned):
        return None
    evidence = (
        f"Reward went from {top.mean():.3f} ({steps_of(top)}) to {format_estimate(mean_of(list(end)))} "
        f"({steps_of(end)}), and entropy from {before:.2g} to {after:.2g} in the steps after step {best}."
    )
    return Line(LARGE_STEP, best, evidence, records.wording.smaller_steps())


def follows_noise(records: RunRecords) -> Line | None:
    """Report a batch far below the noise scale, if reward does not rise."""
    ratio = last_of(records.run.with_interval("gns/batch_ratio"))
    rate = line_through(records.reward)
    if ratio is None or len(records.reward) < STEPS_OF_NOISE or not ratio.bounds()[1] < MAX_BATCH_RATIO:
        return None
    gained = rate.bounds()[1] * float(records.reward.index[-1] - records.reward.index[0])  # upper bound
    if (
        rate.bounds()[0] > 0
        or gained > MAX_REWARD_GAIN * float(records.spread.mean())
        or recent(records.spread).max() == 0
    ):
        return None
    low, high = ratio.bounds()
    reward = "reward falls" if rate.bounds()[1] < 0 else "reward has not detectably risen"
    evidence = (
        f"A step follows noise: the batch is {max(low, 0.0):.2g} to {high:.2g} of the gradient's noise scale, and "
        f"{reward} ({milli(rate)} thousandths a step)."
    )
    times = max(2, math.ceil(0.5 / high)) if high > 0 else 8
    advice = records.wording.larger_batch(min(times, 16)).followed_by(", or a lower learning_rate")
    if fall_as_if_by_lot(records):
        evidence += " Within prompts, rewards differ as if drawn by lot."
        check = "Check whether the reward function returns rewards in the order of the completions; if it does,"
        advice = Advice.to_do(f"{check} {advice.text}.", advice)
    return Line(NOISE, int(records.reward.index[0]), evidence, advice)

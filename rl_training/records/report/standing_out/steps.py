"""What stands out of the steps: they move nothing, they are too large, or they follow noise."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from rl_training.records.report.series import last_of, to_estimates
from rl_training.records.report.standing_out.line import Line, Recorded, in_percent, recent, steps_of
from rl_training.records.report.trends import MIN_STEPS, first_of_trailing, line_through, mean_of_recent, share_of
from rl_training.records.report.verdict import forward_and_backward, predictions_part
from rl_training.records.report.writing import in_words, milli
from rl_training.statistics.welch import mean_of

NOTHING = 0.02  # of the range of the reward: all steps together can have moved no more
SURVIVES = 0.5  # of a step, after rounding
TOO_FAR = 0.1  # KL of a step, per token, over the entropy per token: fifty times what target_kl_share is set to
LEFT = 0.5  # of the sequences, after importance weights: less is no estimate
NOTABLE = 0.05  # nats of a response, below which no step is called large
OFTEN = 0.2  # of the steps
BEST = 3  # steps at which reward was best
FAR_OFF = 4.0  # standard errors of a fall from there
GONE = 0.5  # share of the best that is gone
TURNED = 0.5  # share of entropy by which it changes then
NOISY = 0.25  # the batch over the noise scale
STILL = 0.25  # standard deviations of the reward: where it can have gained more, it need not stand still
STEPS_OF_NOISE = 12  # that reward must have had to rise in


def moves_nothing(recorded: Recorded) -> Line | None:
    """Say that the steps hardly move the policy, and what is recorded of why."""
    return _lost_to_rounding(recorded) or _hardly_moves(recorded) or _no_rate(recorded)


def _lost_to_rounding(recorded: Recorded) -> Line | None:
    shares = recorded.run.values("update/surviving_share")
    if len(shares) < min(3, len(recorded.run.steps)) or not len(shares) or not recent(shares).mean() < SURVIVES:
        return None
    left = mean_of_recent(shares)
    said = f"Rounding to the weights' dtype leaves {in_words(left)} of a step."
    since = first_of_trailing(shares < SURVIVES) or int(shares.index[0])
    return Line(
        "no_step", since, said, "Setting: weights in float32 (bf16=True computes in bf16), or a higher learning_rate."
    )


def _hardly_moves(recorded: Recorded) -> Line | None:
    """By the KL of the steps: √(½ (Σ √KL)²) bounds what they have changed of a reward in its range (Pinsker)."""
    kl, length = recorded.run.values("measured/kl").align(recorded.length, join="inner")
    if len(kl) < MIN_STEPS:
        return None
    of_responses = (kl * length).clip(lower=0.0)
    most = math.sqrt(0.5) * float(np.sqrt(of_responses).sum())
    if most >= NOTHING or (recorded.mixed.reindex(kl.index) == 0).all():
        return None
    said = (
        f"The steps move nothing: KL is {in_words(mean_of(list(of_responses)))} nats per response and step, and all "
        f"{len(kl)} together can have changed the mean reward by {most:.2g} of its range at most."
    )
    return Line("no_step", int(kl.index[0]), f"{said} {_why_so_little(recorded)}", _more(recorded))


def _no_rate(recorded: Recorded) -> Line | None:
    rates = recent(recorded.run.logged("learning_rate"))
    if len(rates) < MIN_STEPS or rates.max() > 1e-6 * recorded.set_up.number("learning_rate", math.inf):
        return None
    since = first_of_trailing(recorded.run.logged("learning_rate") <= rates.max()) or int(rates.index[0])
    said = f"The learning rate is {rates.max():.2g} ({steps_of(rates)}): the steps move nothing."
    return Line("no_step", since, said, "Setting: learning_rate, its schedule and warm-up.")


def _why_so_little(recorded: Recorded) -> str:
    rate, norm = recorded.run.logged("learning_rate"), recorded.run.logged("grad_norm")
    clip, parts = recorded.set_up.number("max_grad_norm"), []
    if len(rate):
        parts.append(f"the learning rate is {rate.iloc[-1]:.2g}")
    if len(norm) and 0 < clip < 0.5 * norm.median():
        parts.append(f"clipping leaves {clip / norm.median():.2g} of the gradient (norm {norm.median():.2g})")
    trained = recorded.set_up.trained_parameters
    if trained is not None:
        parts.append(f"{trained:,} parameters are trained")
    return f"{', '.join(parts).capitalize()}." if parts else ""


def _more(recorded: Recorded) -> str:
    norm, clip = recorded.run.logged("grad_norm"), recorded.set_up.number("max_grad_norm")
    if str(recorded.set_up.trainer("optim", "")).startswith("sgd") and len(norm) and 0 < clip < 0.5 * norm.median():
        return f"Setting: {recorded.set_up.line(max_grad_norm=float(norm.median()))}."
    return f"Setting: {recorded.set_up.bounded_step()}, which finds a rate, or learning_rate and what is trained."


def too_large(recorded: Recorded) -> Line | None:
    """Say that steps are too large: by how far they move the policy, or by forward against backward."""
    return (
        _one_is_beyond_all(recorded) or _too_far(recorded) or _first_order_fails(recorded) or _reward_is_gone(recorded)
    )


def _far(recorded: Recorded) -> tuple[pd.DataFrame, pd.Series[float]]:
    """Return the KL of each step, by the step that it is of, and the entropy of the policy before it."""
    kl = recorded.run.known("measured/kl")
    kl = kl.set_index(kl["about_step"].astype(int)) if len(kl) else kl
    return kl, recorded.run.token_entropy().reindex(kl.index)


def _one_is_beyond_all(recorded: Recorded) -> Line | None:
    """By one step that moved the policy by more than all of its entropy."""
    kl, entropy = _far(recorded)
    beyond = kl["low"] > entropy.clip(lower=1e-12)
    beyond &= kl["value"] * recorded.length.reindex(kl.index).fillna(0.0) > 1.0  # a nat of a response
    if not beyond.any():
        return None
    step = int(kl.index[beyond.to_numpy()][0])
    moved = to_estimates(kl)[step]
    said = (
        f"A step is too large: step {step} moved the policy by {in_words(moved)} nats per token (KL), and its entropy "
        f"was {entropy[step]:.2g}."
    )
    return Line("large_step", step, said, f"Setting: {recorded.set_up.bounded_step()}.")


def _too_far(recorded: Recorded) -> Line | None:
    """By how often steps moved the policy far."""
    rows, entropy = _far(recorded)
    kl, ess = rows["value"], recorded.run.values("measured/ess").reindex(recorded.run.known("measured/kl").index)
    if len(kl) < MIN_STEPS:
        return None
    of_responses = kl * recorded.length.reindex(kl.index)
    far = (kl > TOO_FAR * entropy.clip(lower=1e-12)) & (of_responses > NOTABLE) | (ess.to_numpy() < LEFT)
    share = share_of(int(far.sum()), len(far))
    if not share.bounds()[0] > OFTEN:
        return None
    said = (
        f"Steps are too large: {in_percent(share)} of them moved the policy by more than {TOO_FAR:g} of its entropy, "
        f"or so far that less than half of the sequences' weight is left. KL is {kl.median():.2g} nats per token in "
        "the median."
    )
    since = int(far.index[far.to_numpy()][0])
    return Line("large_step", since, said, f"Setting: {recorded.set_up.bounded_step()}.")


def _first_order_fails(recorded: Recorded) -> Line | None:
    apart = forward_and_backward(recorded.run)
    if apart is None or not predictions_part(recorded.run):
        return None
    forward, half = apart
    said = (
        f"Steps are too large for first order: half of forward − backward is {milli(half)} thousandths of a nat, of a "
        f"forward of {milli(forward)}, the mean over the last steps."
    )
    return Line("large_step", int(recent(recorded.run.values("delta_h/forward")).index[0]), said,
                f"Setting: {recorded.set_up.bounded_step()}.")  # fmt: skip


def _reward_is_gone(recorded: Recorded) -> Line | None:
    """Where no KL is recorded: reward has gone and stays away, and entropy changed by half or more as it went."""
    reward, levels = recorded.reward, recorded.run.token_entropy()
    if len(recorded.run.values("measured/kl")) or len(reward) < MIN_STEPS or not recorded.set_up.sequences > 0:
        return None
    end = reward.tail(MIN_STEPS)
    highest = float(reward.rolling(BEST, min_periods=1).mean().max())
    good = reward.index[(reward >= 0.5 * highest + 0.5 * end.mean()).to_numpy()]
    if good.empty:
        return None
    best = int(good[-1])
    top = reward[reward.index <= best].tail(BEST)
    noise = 2 * float(recorded.spread.max()) / math.sqrt(recorded.set_up.sequences)
    fall = float(top.mean() - end.mean())
    before, after = levels[levels.index <= best].tail(BEST).mean(), levels[levels.index > best].head(BEST).mean()
    turned = before > 0 and abs(after / before - 1) > TURNED
    if not (fall > FAR_OFF * noise and fall > GONE * float(top.mean()) and turned):
        return None
    said = (
        f"Reward went from {top.mean():.3f} ({steps_of(top)}) to {in_words(mean_of(list(end)))} ({steps_of(end)}), and "
        f"entropy from {before:.2g} to {after:.2g} in the steps after step {best}."
    )
    return Line("large_step", best, said, f"Setting: {recorded.set_up.bounded_step()}, or a lower learning_rate.")


def follows_noise(recorded: Recorded) -> Line | None:
    """Say that the batch is far below the noise scale, where reward does not rise."""
    ratio = last_of(recorded.run.with_interval("gns/batch_ratio"))
    rate = line_through(recorded.reward)
    if ratio is None or len(recorded.reward) < STEPS_OF_NOISE or not ratio.bounds()[1] < NOISY:
        return None
    gained = rate.bounds()[1] * float(recorded.reward.index[-1] - recorded.reward.index[0])  # at most
    if rate.bounds()[0] > 0 or gained > STILL * float(recorded.spread.mean()) or recent(recorded.spread).max() == 0:
        return None
    low, high = ratio.bounds()
    said = (
        f"A step follows noise: the batch is {max(low, 0.0):.2g} to {high:.2g} of the gradient's noise scale, and "
        f"reward has not detectably risen ({milli(rate)} thousandths a step)."
    )
    times = max(2, math.ceil(0.5 / high)) if high > 0 else 8
    setting = f"Setting: {recorded.set_up.larger_batch(min(times, 16))}, or a lower learning_rate."
    return Line("noise", int(recorded.reward.index[0]), said, setting)

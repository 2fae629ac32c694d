"""What stands out in the responses: most are cut off, none ends, or they are sampled by another policy."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from rl_training.records.pages.writing import format_estimate, steps_of
from rl_training.records.report.standing_out.line import (
    CUT_OFF,
    ENDLESS,
    FEW_STEPS,
    SAMPLER,
    Line,
    RunRecords,
    in_percent,
    recent,
)
from rl_training.records.report.wording import Advice
from rl_training.records.table.trends import RECENT, first_of_trailing, mean_of_recent
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import difference, mean_of

MIN_CUT_OFF_SHARE = 0.5  # share of responses
MIN_ESS = 0.8  # ESS as a share of the sequences, below which the batch is no longer the policy's
MIN_MEAN_RATIO = 0.97  # mean ratio of policy to sampler; it is 1 if the sampler leaves no token out
# Settings that truncate the sampling distribution, with the value that truncates nothing.
CUTS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def no_end(records: RunRecords) -> Line | None:
    """Report that no response ends by itself."""
    cut = recent(records.cut_off)
    if len(cut) < FEW_STEPS or not (cut >= 1).all():
        return None
    ended = records.of_responses(1 - cut)
    since = first_of_trailing(records.cut_off >= 1) or int(cut.index[0])
    evidence = (
        f"No response ends: {in_percent(ended)} of them end by themselves, {steps_of(cut)}; all others are cut off."
    )
    longer = records.wording.longer_responses()
    token = "eos_token_id of the model and its tokenizer"
    advice = Advice(f"{token} or {longer.text}", longer.settings) if longer.settings else Advice(token)
    return Line(ENDLESS, since, evidence, advice)


def most_cut_off(records: RunRecords) -> Line | None:
    """Report that most responses are cut off at the maximum length."""
    cut = recent(records.cut_off)
    share = mean_of_recent(records.cut_off)
    if len(cut) < FEW_STEPS or (cut >= 1).all() or not share.bounds()[0] > MIN_CUT_OFF_SHARE:
        return None
    since = first_of_trailing(records.cut_off > MIN_CUT_OFF_SHARE) or int(cut.index[0])
    length = records.set_up.number("max_completion_length")
    at = f" at {length:.0f} tokens" if math.isfinite(length) else ""
    evidence = f"{format_estimate(share)} of the responses are cut off{at} ({steps_of(cut)})."
    return Line(CUT_OFF, since, evidence, records.wording.longer_responses())


def other_sampler(records: RunRecords) -> Line | None:
    """Report that the sampling policy is not the one that is trained: by settings, or by measurement."""
    return _by_settings(records) or _by_own_tokens(records) or _by_measurement(records)


def _by_settings(records: RunRecords) -> Line | None:
    sampling: dict[str, Any] = {name: records.set_up.trainer(name) for name in CUTS}
    sampling |= records.set_up.of_generation
    cut = {name: sampling[name] for name, whole in CUTS.items() if _is_other(sampling.get(name), whole)}
    if cut.get("top_k", 0) < 0:
        cut.pop("top_k")
    trained = records.set_up.number("temperature", 1.0)
    sampled = sampling.get("temperature")
    first = records.run.steps[0]
    if _is_other(sampled, trained):
        evidence = f"Responses are sampled at temperature {sampled:g}, and the policy that is trained has {trained:g}."
        advice = records.wording.sample_with(temperature=trained)
        return Line(SAMPLER, first, f"{evidence}{_distance(records)}", advice)
    if not cut:
        return None
    which = ", ".join(f"{name}={value:g}" for name, value in cut.items())
    evidence = (
        f"Responses are sampled with {which}: tokens that the policy would choose are left out.{_distance(records)}"
    )
    return Line(SAMPLER, first, evidence, records.wording.sample_with(**{name: CUTS[name] for name in cut}))


def _is_other(value: Any, whole: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value != whole


def _distance(records: RunRecords) -> str:
    kl = mean_of_recent(records.run.values("sampler/kl"))
    return f" They are {format_estimate(kl)} nats per token apart (KL)." if kl.value > 0 else ""


def _by_own_tokens(records: RunRecords) -> Line | None:
    """Report that the policy's own scores of its tokens show that it did not draw them (sampler/residual)."""
    rows = records.run.finite_rows("sampler/residual")
    noticed = rows[rows["reason"] != ""]
    if noticed.empty:
        return None
    total = records.run.values("sampler/residual_run").get(noticed.index[-1], math.nan)
    residual = noticed.iloc[-1]
    mean = format_estimate(Estimate(residual["value"], residual["stderr"], int(residual["num_samples"])))
    evidence = (
        f"The policy did not draw its responses: log π(token) + entropy, 0 on average over tokens that it draws, is "
        f"{mean} nats at step {noticed.index[-1]}, and its sum over the run {total:+.1f} standard errors from 0. "
        f"Estimates of earlier steps describe these responses too."
    )
    temperature = records.set_up.number("temperature", 1.0)
    sampler = f"temperature {temperature:g} and top-p 1, without forced tokens"
    return Line(SAMPLER, int(noticed.index[0]), evidence, Advice(f"generate with the trained weights at {sampler}"))


def _by_measurement(records: RunRecords) -> Line | None:
    kl, shares, ratios = (records.run.values(f"sampler/{name}") for name in ("kl", "ess", "mean_ratio"))
    left, ratio = mean_of_recent(shares), mean_of_recent(ratios)
    if kl.empty or not recent(kl).mean() > 0 or not math.isfinite(left.stderr):
        return None
    distance = f"{format_estimate(mean_of_recent(kl))} nats per token apart (KL), {steps_of(recent(kl))}"
    if ratio.bounds()[1] < MIN_MEAN_RATIO and _leaves_tokens_out(left, ratios):
        evidence = (
            f"The sampler leaves tokens out: the mean ratio of the policy to it is {format_estimate(ratio)}, and not "
            f"1. They are {distance}."
        )
        return Line(SAMPLER, int(shares.index[0]), evidence, Advice("the engine's top_p, top_k and temperature"))
    if left.bounds()[1] < MIN_ESS:
        is_low: pd.Series[bool] = shares.rolling(FEW_STEPS, min_periods=1).mean() < MIN_ESS
        since = first_of_trailing(is_low) or int(recent(shares).index[0])
        evidence = f"The policy that samples is not the one that is trained: {distance}"
        if _has_drifted(kl):
            evidence = (
                f"The sampler drifts away from the policy that is trained: {distance}, from {kl.iloc[0]:.2g} at first"
            )
        evidence += f". Importance weights leave {format_estimate(left)} of the sequences."
        return Line(SAMPLER, since, evidence, _fresher_weights(records))
    return None


def _leaves_tokens_out(left: Estimate, ratios: pd.Series[float]) -> bool:
    """Return whether a mean ratio below 1 tells of tokens that are never drawn, and not of weights that grew old.

    A sampler that leaves tokens out does so from the first step on, and hardly makes weights unequal. Where policies
    drift apart, weights are so unequal that their mean in a batch mostly lies below 1, which is that of all responses.
    """
    return left.bounds()[0] >= MIN_ESS or mean_of(list(ratios.head(FEW_STEPS))).bounds()[1] < MIN_MEAN_RATIO


def _has_drifted(kl: pd.Series[float]) -> bool:
    """Return whether KL has grown from the first steps to the last ones."""
    growth = difference(mean_of(list(recent(kl))), mean_of(list(kl.head(FEW_STEPS))))
    return len(kl) > RECENT + FEW_STEPS and growth.bounds()[0] > 0


def _fresher_weights(records: RunRecords) -> Advice:
    """Return the setting that keeps the sampler closer to the policy."""
    if records.set_up.number("num_iterations", 1.0) > 1:
        return records.wording.fields(num_iterations=1)
    return Advice("copy the weights to the sampler more often")

"""The report's section on the distance between the policy that samples and the policy that is trained."""

from __future__ import annotations

from rl_training.records.pages.writing import format_estimate, non_empty_lines, size_and_side, two_digits
from rl_training.records.table.series import Run
from rl_training.statistics.estimate import Estimate

TRUNCATED = "truncated_sampler"  # code of a remark of probes/sampler.py
KL_AT_HALF_SAMPLE = 0.35  # KL of a whole response at which ESS/N ≈ exp(−2 KL T) is a half


def sampler_and_trainer(run: Run) -> list[str]:
    """Return the sentences of the section, for the last measured step; [] if the probe `sampler` did not run."""
    kl = run.last("sampler/kl")
    if kl is None:
        return []
    if kl.value == 0:
        return ["The responses are sampled from the policy that is trained: every ratio is 1."]
    longest = two_digits(KL_AT_HALF_SAMPLE / kl.value) if kl.value > 0 else "inf"
    numerics = run.last("sampler/numerics_kl")
    ess = run.last("sampler/ess")
    outside = run.last("sampler/ratio_outside")
    gap = run.last("sampler/reward_gap")
    corrected = run.last("sampler/corrected_share")
    return non_empty_lines(
        f"Sampler and trainer are {format_estimate(kl)} nats per token apart (KL) at the last measured step.",
        f"At this KL, importance weights hold for responses up to {longest} tokens.",
        f"The trainer's own numerics account for {format_estimate(numerics)} of it." if numerics else "",
        f"With importance weights, the effective sample is {100 * ess.value:.0f}% of the sequences." if ess else "",
        f"{100 * outside.value:.1f}% of the tokens have a ratio outside of 0.9 … 1.1." if outside else "",
        _mean_ratio(run.last("sampler/mean_ratio")),
        f"The trained policy's own reward is {size_and_side(gap, 'higher', 'lower')} than the logged one."
        if gap
        else "",
        f"The loss truncates or masks {100 * corrected.value:.1f}% of the tokens." if corrected else "",
    )


def _mean_ratio(ratio: Estimate | None) -> str:
    """Say that the mean importance ratio is not 1, and why if that is recorded; "" if it may be 1."""
    if ratio is None or not (ratio.bounds()[0] > 1 or ratio.bounds()[1] < 1):
        return ""
    remark = "and not 1"
    if ratio.reason:  # the reason for a truncated sampler begins with "below 1: …"
        remark = ratio.reason if ratio.code == TRUNCATED else f"{remark}: {ratio.reason}"
    return f"The mean ratio is {format_estimate(ratio)}, {remark}."

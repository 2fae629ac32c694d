"""How a report opens: does the run learn, is entropy collapsing, how fast, and are the predictions right."""

from __future__ import annotations

import math

from rl_training.records.report import findings
from rl_training.records.report.series import Run, last_of
from rl_training.records.report.writing import in_words, spoken
from rl_training.statistics.welch import difference, is_significant

ENOUGH_SURVIVES = 0.9  # of a step, after rounding


def opening(run: Run) -> list[str]:
    """Return the sentences that open the report of a run, those that there is something to say for."""
    parts = (_rewards_that_teach_nothing, _level, _rate, _whether_predictions_hold, _bound, _lost_to_rounding)
    return spoken(*(part(run) for part in parts))


def _rewards_that_teach_nothing(run: Run) -> str:
    rewards = run.logged("reward").unique()
    if len(rewards) != 1 or run.logged("reward_std").unique().tolist() != [0.0]:
        return ""
    return (
        f"Every response has earned the same reward, {rewards[0]:g}: all advantages are 0, and nothing is learned from "
        "them. Easier prompts, more responses to each, or a reward for a part of the answer would give a signal."
    )


def _level(run: Run) -> str:
    levels = [mean for mean, _, _ in findings.ends_of(run.token_entropy())]
    if len(levels) != 2:
        return ""
    first, last = levels
    by = f", by {100 * abs(last / first - 1):.0f}%" if first > 0 else ""
    return f"Token entropy has {'fallen' if last < first else 'risen'} from {first:.3f} to {last:.3f} nats{by}."


def _rate(run: Run) -> str:
    rate = findings.present_rate(run)
    if rate is None:
        return ""
    steps = int(rate.detail["steps"])
    over = f"over the last {steps} steps" if steps > 1 else "by the last step"
    figures = f"{in_words(rate, signed=True)} nats a step {over}"
    if not is_significant(rate):
        return f"It does not detectably move now ({figures})."
    return f"It is {'predicted to rise' if rate.value > 0 else 'falling'} now: {figures}."


def _whether_predictions_hold(run: Run) -> str:
    """Compare the sums of predicted and measured changes at the last step that has both."""
    both = [run.known(f"delta_h/cumulative_{kind}") for kind in ("measured", "predicted")]
    last = both[0].index.intersection(both[1].index, sort=False)[-1:]
    truth, total = (last_of(rows.loc[last]) for rows in both)
    if truth is None or total is None or total.stderr == 0:
        return ""
    apart = difference(total, truth)
    figures = f"they add up to {in_words(total, True)} nats, and {in_words(truth, True)} was measured"
    if math.isnan(apart.stderr):
        return "Whether the predictions can be trusted is unknown: predictions or measurements have no error bar."
    if is_significant(apart):
        return f"Do not trust the predictions here: {figures}, which is further apart than their errors allow."
    return f"The predictions hold so far: {figures}."


def _bound(run: Run) -> str:
    """Say how steps were bounded by their KL, where they were."""
    kl, tries, rates = (run.known(f"bound/{name}")["value"] for name in ("kl", "tries", "learning_rate"))
    if kl.empty:
        return ""
    shortened = int((tries > 0).sum())
    return (
        f"KL bounds the steps: {kl.median():.2g} nats per token in the median. {shortened} of {len(kl)} steps were "
        f"shortened, and the learning rate went from {rates.iloc[0]:.2g} to {rates.iloc[-1]:.2g}."
    )


def _lost_to_rounding(run: Run) -> str:
    share = run.last("update/surviving_share")
    if share is None or share.value >= ENOUGH_SURVIVES:
        return ""
    lost = 100 * (1 - share.value)
    return f"{lost:.0f}% of this step is lost to rounding: keep fp32 weights, or raise the learning rate."

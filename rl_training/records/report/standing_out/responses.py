"""What stands out in the responses: none ends, or most are cut off.

Thresholds were chosen by hand, on the trainings of seed 0 of benchmarks/planted_faults.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from rl_training.records.pages.writing import format_estimate, steps_of
from rl_training.records.report.proposals import Change
from rl_training.records.report.standing_out.finding import Anomaly
from rl_training.records.report.standing_out.run_records import FEW_STEPS, RunRecords, in_percent, recent, span_of
from rl_training.records.report.wording.base import Wording
from rl_training.records.table.trends import first_of_trailing, mean_of_recent
from rl_training.statistics.estimate import Estimate

MIN_CUT_OFF_SHARE = 0.5  # share of responses


@dataclass(frozen=True)
class NoResponseEnds(Anomaly):
    """No response ends by itself.

    Args:
        ended: The share of responses that do: 0, with its interval.
        steps: The first and last of the steps that it was counted over.
    """

    ended: Estimate
    steps: tuple[int, int]

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        cut_off = recent(records.cut_off)
        if len(cut_off) < FEW_STEPS or not (cut_off >= 1).all():
            return None
        steps = span_of(cut_off)
        since = first_of_trailing(records.cut_off >= 1) or steps[0]
        return cls(since, records.of_responses(1 - cut_off), steps)

    @property
    def evidence(self) -> str:
        return (
            f"No response ends: {in_percent(self.ended)} of them end by themselves, {steps_of(self.steps)}; all others "
            "are cut off."
        )

    def advice(self, wording: Wording) -> Change:
        end_token = Change("the right eos_token_id in the model and its tokenizer", target="eos_token_id")
        longer = wording.longer_responses()
        if not longer.settings:
            return end_token
        return replace(end_token.followed_by(f", or {longer.text}"), settings=longer.settings)


@dataclass(frozen=True)
class MostCutOff(Anomaly):
    """Most responses are cut off at the maximum length.

    Args:
        share: The share of responses that are.
        steps: The first and last of the steps that it was averaged over.
        length: The maximum length in tokens; nan if not recorded.
    """

    share: Estimate
    steps: tuple[int, int]
    length: float

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        cut_off = recent(records.cut_off)
        share = mean_of_recent(records.cut_off)
        if len(cut_off) < FEW_STEPS or (cut_off >= 1).all() or not share.bounds()[0] > MIN_CUT_OFF_SHARE:
            return None
        steps = span_of(cut_off)
        since = first_of_trailing(records.cut_off > MIN_CUT_OFF_SHARE) or steps[0]
        return cls(since, share, steps, records.set_up.number("max_completion_length"))

    @property
    def evidence(self) -> str:
        place = f" at {self.length:.0f} tokens" if math.isfinite(self.length) else ""
        return f"{format_estimate(self.share)} of the responses are cut off{place} ({steps_of(self.steps)})."

    def advice(self, wording: Wording) -> Change:
        return wording.longer_responses()

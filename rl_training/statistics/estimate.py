"""An estimate: a value with its standard error, or nan with the reason why it is not available."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from scipy.special import stdtrit

MIN_UNITS_OFFLINE = 8  # with fewer, a jackknife error is itself too noisy to be quoted
MIN_FOLDS_STEP = 4  # of a step: Student's t makes up for the noise of its error, which is some 40 % then


def why_no_stderr(num_folds: int) -> str:
    """Returns why so few folds give no error bar, "" if they are enough."""
    if num_folds >= MIN_FOLDS_STEP:
        return ""
    return f"no error bar: it needs {MIN_FOLDS_STEP} folds of whole prompts, the step has {num_folds}"


@dataclass(frozen=True)
class Estimate:
    """A measured number.

    value        the estimate; nan when it is not available here, never clamped
    stderr       its standard error (one sigma); nan when unknown
    num_samples  independent units behind the error: folds of prompts for a jackknife; where errors of several steps are
                 averaged, the number with their degrees of freedom. Student's t has num_samples − 1
    reason       why `value` or `stderr` is nan; else empty, or a remark
    about_step   the optimizer step it refers to, when that is not the step at which it was measured
    detail       further facts about it, written to probes.jsonl
    interval     ends of its 95 % interval where that is not value ± half_width(): of a share near 1, of a ratio
    """

    value: float
    stderr: float = math.nan
    num_samples: int = 0
    reason: str = ""
    about_step: int | None = None
    detail: Mapping[str, str | float] = field(default_factory=dict)
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if math.isnan(self.value) and not self.reason:
            raise ValueError("an Estimate that is nan must say why: give `reason`")

    @classmethod
    def missing(cls, reason: str) -> Estimate:
        """Returns nan with its reason."""
        return cls(math.nan, reason=reason)

    def half_width(self, coverage: float = 0.95) -> float:
        """Returns h such that value ± h is the Student-t interval of this coverage; nan without a standard error.

        h = t_{(1+coverage)/2, num_samples−1} · stderr.

        >>> round(Estimate(-2.0, stderr=0.1, num_samples=8).half_width(), 4)
        0.2365
        """
        if math.isnan(self.stderr):
            return math.nan
        return float(stdtrit(self.num_samples - 1, 0.5 + 0.5 * coverage)) * self.stderr

    def bounds(self) -> tuple[float, float]:
        """Returns the ends of the 95 % interval, `interval` if that is given; nan without an error."""
        return self.interval or (self.value - self.half_width(), self.value + self.half_width())

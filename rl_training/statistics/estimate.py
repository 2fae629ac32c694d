"""An estimate: a value with its standard error, or nan with the reason why it is not available."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from scipy.special import stdtrit

from rl_training.statistics.limit import Limit

MIN_UNITS_OFFLINE = 8  # from fewer units, a jackknife error is itself too noisy to be quoted
MIN_FOLDS_STEP = 4  # folds or prompts of a step; the error is then known to some 40 %, which Student's t accounts for
FEW_FOLDS = Limit("few_folds", "no error bar: it needs {least} folds of whole prompts, the step has {count}")
FEW_PROMPTS = Limit("few_prompts", "no error bar: it needs {least} prompts, the step has {count}")


def stderr_limit(num_units: int, few: Limit = FEW_FOLDS) -> Limit | None:
    """Return the limit of a step with too few folds, or other independent units, for an error bar; or None."""
    return None if num_units >= MIN_FOLDS_STEP else few.filled(least=MIN_FOLDS_STEP, count=num_units)


@dataclass(frozen=True)
class Estimate:
    """A measured number with its standard error, or nan with a reason."""

    value: float  # nan where the number is not available; never clamped
    stderr: float = math.nan  # one sigma; nan where it is unknown
    # Independent units behind the error, such as folds of prompts: Student's t has num_samples − 1 degrees of freedom.
    # Where errors of several steps are averaged, the number that has the average's degrees of freedom.
    num_samples: int = 0
    reason: str = ""  # why `value` or `stderr` is nan, often a Limit; otherwise empty, or a remark
    about_step: int | None = None  # the optimizer step that it refers to, if it was measured at another one
    detail: Mapping[str, str | float] = field(default_factory=dict)  # further facts, written to probes.jsonl
    # The 95 % interval, where it is not value ± half_width(), as for a share near 1 or for a ratio.
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if math.isnan(self.value) and not self.reason:
            raise ValueError("an Estimate that is nan must say why: give `reason`")

    @classmethod
    def missing(cls, reason: str) -> Estimate:
        """Return an estimate without a value, for this reason: a Limit, or a text of your own."""
        return cls(math.nan, reason=reason)

    @property
    def code(self) -> str:
        """The code of the Limit that is its reason, "" for any other. Records hold it beside the text."""
        return self.reason.code if isinstance(self.reason, Limit) else ""

    def half_width(self, coverage: float = 0.95) -> float:
        """Return h for which value ± h is the Student-t interval of this coverage.

        h = t_{(1+coverage)/2, num_samples−1} · stderr, and nan where there is no standard error.

        >>> round(Estimate(-2.0, stderr=0.1, num_samples=8).half_width(), 4)
        0.2365
        """
        if math.isnan(self.stderr):
            return math.nan
        return float(stdtrit(self.num_samples - 1, 0.5 + 0.5 * coverage)) * self.stderr

    def bounds(self) -> tuple[float, float]:
        """Return the ends of the 95 % interval: `interval` where it is given, otherwise value ± half_width()."""
        return self.interval or (self.value - self.half_width(), self.value + self.half_width())

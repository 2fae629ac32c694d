"""An estimate: a value with its standard error, or nan with the reason why it is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.special import stdtrit

from rl_training.statistics.unavailable import Unavailable

Z_95 = 1.96  # half of a 95 % interval in standard errors, of a normal distribution
DESCRIBES_STEP = "no error bar: it describes this step"
NOT_FINITE_GRADIENT = Unavailable("not_finite_gradient", "a gradient or the update of the step is not finite")


def half_widths(num_samples: np.ndarray, stderr: np.ndarray, coverage: float = 0.95) -> np.ndarray:
    """Return `Estimate.half_width` of several estimates at once; nan without a standard error."""
    return np.asarray(stdtrit(num_samples - 1, 0.5 + 0.5 * coverage) * stderr)


def effective_samples(num_samples: int, batches: float) -> int:
    """Return the degrees of freedom plus 1 of an error averaged over batches, rounded down.

    Args:
        num_samples: Independent units of each batch.
        batches: The number of batches with equal variances that the average has as many degrees of freedom as
            (Satterthwaite).
    """
    return 1 + int((num_samples - 1) * batches + 1e-9)  # 1e-9: a product that is whole may be rounded below it


@dataclass(frozen=True)
class Estimate:
    """A measured number with its standard error, or nan with a reason."""

    value: float  # nan if it is not available; never clamped
    stderr: float = math.nan  # one sigma; nan if unknown
    # Independent units behind the error, such as folds of prompts: Student's t has num_samples − 1 degrees of freedom.
    # For an error averaged over several steps, the average's degrees of freedom plus 1.
    num_samples: int = 0
    reason: str = ""  # why one of both is nan, an Unavailable or text; without nan, "" or a remark on the value
    about_step: int | None = None  # the optimizer step it refers to, if measured at another one
    detail: Mapping[str, str | float] = field(default_factory=dict)  # further facts, written to probes.jsonl
    # The 95 % interval if it is not value ± half_width(), for example of a share near 1 or of a ratio.
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if math.isnan(self.value) and not self.reason:
            raise ValueError("an Estimate that is nan must say why: give `reason`")

    @classmethod
    def missing(cls, reason: str) -> Estimate:
        """Return an estimate that is nan for this reason, an Unavailable or any text."""
        return cls(math.nan, reason=reason)

    @property
    def code(self) -> str:
        """The code of its reason if that is an Unavailable, otherwise "". Records store it next to the text."""
        return self.reason.code if isinstance(self.reason, Unavailable) else ""

    @property
    def message(self) -> str:
        """Its reason without what to do about it."""
        return self.reason.message if isinstance(self.reason, Unavailable) else self.reason

    @property
    def fix(self) -> str:
        """What its reason says to do about it; "" if nothing."""
        return self.reason.fix if isinstance(self.reason, Unavailable) else ""

    def half_width(self, coverage: float = 0.95) -> float:
        """Return h such that value ± h is the Student-t interval with this coverage; nan without a standard error.

        h = t_{(1+coverage)/2, num_samples−1} · stderr.

        >>> round(Estimate(-2.0, stderr=0.1, num_samples=8).half_width(), 4)
        0.2365
        """
        if math.isnan(self.stderr):
            return math.nan
        return float(half_widths(np.asarray(self.num_samples), np.asarray(self.stderr), coverage))

    def bounds(self) -> tuple[float, float]:
        """Return the ends of the 95 % interval: `interval` if it is given, otherwise value ± half_width()."""
        return self.interval or (self.value - self.half_width(), self.value + self.half_width())

"""What stands out in the sampler: another policy than the trained one draws the responses.

By the policy's own scores of its tokens: NotDrawn. By measurement, if the sampler's log-probabilities are recorded:
SamplerLeavesOut, SamplerIsBehind. sampler_settings.py has what settings show.

Thresholds were chosen by hand, on the trainings of seed 0 of benchmarks/planted_faults.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import pandas as pd

from rl_training.records.pages.writing import format_estimate, steps_of
from rl_training.records.report.proposals import Change
from rl_training.records.report.standing_out.finding import Anomaly
from rl_training.records.report.standing_out.run_records import FEW_STEPS, RunRecords, recent
from rl_training.records.report.wording.base import Wording
from rl_training.records.table.estimates import last_of
from rl_training.records.table.trends import RECENT, first_of_trailing, mean_of_recent
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import difference, mean_of

MIN_ESS = 0.8  # ESS as a share of the sequences, below which the batch is no longer the policy's
MIN_MEAN_RATIO = 0.97  # mean ratio of policy to sampler; it is 1 if the sampler leaves no token out


@dataclass(frozen=True)
class NotDrawn(Anomaly):
    """The policy's own scores of its tokens show that it did not draw them (sampler/residual).

    Args:
        residual: Mean of log π(token) + entropy at the last step that shows it, in nats.
        last: That step.
        num_stderrs: Sum over the run in its standard errors; nan if not recorded.
    """

    residual: Estimate
    last: int
    num_stderrs: float

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        rows = records.run.finite_rows("sampler/residual")
        noticed = rows[rows["reason"] != ""]
        residual = last_of(noticed)
        if residual is None:
            return None
        last = int(noticed.index[-1])
        num_stderrs = float(records.run.values("sampler/residual_run").get(last, math.nan))
        return cls(int(noticed.index[0]), residual, last, num_stderrs)

    @property
    def evidence(self) -> str:
        return (
            "The policy did not draw its responses: log π(token) + entropy, 0 on average over tokens that it draws, is "
            f"{format_estimate(self.residual)} nats at step {self.last}, and its sum over the run "
            f"{self.num_stderrs:+.1f} standard errors from 0. Estimates of earlier steps describe these responses too."
        )

    def advice(self, wording: Wording) -> Change:
        temperature = wording.set_up.number("temperature", 1.0)
        return Change(
            f"responses generated with the trained weights at temperature {temperature:g} and top-p 1, without forced "
            "tokens",
            target="the sampler",
        )


@dataclass(frozen=True)
class _Measured:
    """What the probe `sampler` has measured, by step.

    Args:
        kl: KL between the sampler and the policy, in nats per token.
        ess: Effective sample size with importance weights, as a share of the sequences.
        ratios: Mean ratio of the policy to the sampler.
    """

    kl: pd.Series[float]
    ess: pd.Series[float]
    ratios: pd.Series[float]

    @classmethod
    def of(cls, records: RunRecords) -> Self | None:
        """Return the measurements; None if both policies are the same, or if nothing shows whether they are."""
        measured = cls(*(records.run.values(f"sampler/{name}") for name in ("kl", "ess", "mean_ratio")))
        if measured.kl.empty or not recent(measured.kl).mean() > 0 or not math.isfinite(measured.left.stderr):
            return None
        return measured

    @property
    def left(self) -> Estimate:
        """The recent mean of `ess`."""
        return mean_of_recent(self.ess)

    @property
    def leaves_tokens_out(self) -> bool:
        """Whether the mean ratio is below 1 because of tokens that are never drawn, and not of weights that grew old.

        A sampler that leaves tokens out does so from the first step on, and hardly makes weights unequal. Where
        policies drift apart, weights are so unequal that their mean in a batch mostly lies below 1, which is that of
        all responses.
        """
        if not mean_of_recent(self.ratios).bounds()[1] < MIN_MEAN_RATIO:
            return False
        at_first = mean_of(list(self.ratios.head(FEW_STEPS)))
        return self.left.bounds()[0] >= MIN_ESS or at_first.bounds()[1] < MIN_MEAN_RATIO

    @property
    def has_drifted(self) -> bool:
        """Whether KL has grown from the first steps to the last ones."""
        growth = difference(mean_of(list(recent(self.kl))), mean_of(list(self.kl.head(FEW_STEPS))))
        return len(self.kl) > RECENT + FEW_STEPS and growth.bounds()[0] > 0

    @property
    def distance(self) -> str:
        """How far both are apart, in words."""
        return f"{format_estimate(mean_of_recent(self.kl))} nats per token apart (KL), {steps_of(recent(self.kl))}"


@dataclass(frozen=True)
class SamplerLeavesOut(Anomaly):
    """The sampler was measured to leave tokens out.

    Args:
        measured: What was measured.
    """

    measured: _Measured

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        measured = _Measured.of(records)
        if measured is None or not measured.leaves_tokens_out:
            return None
        return cls(int(measured.ess.index[0]), measured)

    @property
    def evidence(self) -> str:
        ratio = format_estimate(mean_of_recent(self.measured.ratios))
        return (
            f"The sampler leaves tokens out: the mean ratio of the policy to it is {ratio}, and not 1. They are "
            f"{self.measured.distance}."
        )

    def advice(self, wording: Wording) -> Change:
        temperature = wording.set_up.number("temperature", 1.0)
        return Change(f"an engine with top_p=1 and temperature {temperature:g}, without top_k", target="the sampler")


@dataclass(frozen=True)
class SamplerIsBehind(Anomaly):
    """The sampler was measured to be so far from the policy that importance weights leave few of the sequences.

    Args:
        measured: What was measured.
    """

    measured: _Measured

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        measured = _Measured.of(records)
        if measured is None or not measured.left.bounds()[1] < MIN_ESS:
            return None
        is_low: pd.Series[bool] = measured.ess.rolling(FEW_STEPS, min_periods=1).mean() < MIN_ESS
        return cls(first_of_trailing(is_low) or int(recent(measured.ess).index[0]), measured)

    @property
    def evidence(self) -> str:
        what = f"The policy that samples is not the one that is trained: {self.measured.distance}"
        if self.measured.has_drifted:
            first = f"{self.measured.kl.iloc[0]:.2g} at first"
            what = f"The sampler drifts away from the policy that is trained: {self.measured.distance}, from {first}"
        return f"{what}. Importance weights leave {format_estimate(self.measured.left)} of the sequences."

    def advice(self, wording: Wording) -> Change:
        if wording.set_up.number("num_iterations", 1.0) > 1:
            return wording.fields(num_iterations=1)
        return Change("weights copied to the sampler more often", target="weights of the sampler")

"""What stands out in the steps: they move nothing, or next to nothing.

Thresholds were chosen by hand, on the trainings of seed 0 of benchmarks/planted_faults.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from rl_training.records.pages.writing import capitalized, format_estimate, steps_of
from rl_training.records.report.proposals import Change, Proposal, Task
from rl_training.records.report.set_up import SetUp
from rl_training.records.report.standing_out.finding import Anomaly
from rl_training.records.report.standing_out.run_records import FEW_STEPS, RunRecords, recent, span_of
from rl_training.records.report.wording.base import Wording, rounded
from rl_training.records.table.measured import of_one_step
from rl_training.records.table.trends import MIN_STEPS, first_of_trailing, mean_of_recent
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import mean_of

MIN_REWARD_MOVE = 0.02  # of the reward's range: steps that all together move it less move nothing
MIN_SURVIVING_SHARE = 0.5  # share of a step that must survive rounding
NO_RATE = 1e-6  # share of the highest learning rate: one not above it is no rate
SHORT_WARM_UP = 0.1  # of the steps of a run: what is advised instead of one that goes on
MIN_CLIPPING = 0.5  # a norm is clipped by much if the limit is below this share of it


@dataclass(frozen=True)
class WarmUp:
    """A warm-up that the run is still in.

    Args:
        length: Its steps.
        done: The steps so far.
        planned: The steps of the whole run; those so far if that is not recorded.
    """

    length: float
    done: int
    planned: float

    @classmethod
    def of(cls, records: RunRecords) -> Self | None:
        """Return the run's warm-up; None if it is past it, or has none."""
        set_up = records.set_up
        done = records.run.steps[-1]
        max_steps = set_up.number("max_steps", 0.0)
        planned = max_steps if max_steps > 0 else done  # TRL: −1 if epochs decide
        length = _warm_up_steps(set_up, planned)
        return cls(length, done, planned) if length > done else None

    @property
    def sentence(self) -> str:
        return f"The warm-up takes {self.length:.0f} steps, and {self.done} are done."

    def advice(self, wording: Wording) -> Proposal:
        """Return a shorter warm-up, or that it ends soon."""
        shorter = max(1, round(SHORT_WARM_UP * self.planned))
        if self.length <= shorter:
            return Task(f"wait until step {self.length:.0f}, where the warm-up ends", target="warmup_steps")
        return wording.fields(warmup_steps=shorter)


def _warm_up_steps(set_up: SetUp, planned: float) -> float:
    """Return the steps of the warm-up, from either of TRL's fields. A `warmup_steps` below 1 is a share."""
    warm_up = set_up.number("warmup_steps", 0.0)
    if warm_up >= 1:
        return warm_up
    return max(warm_up, set_up.number("warmup_ratio", 0.0)) * planned


@dataclass(frozen=True)
class NoRate(Anomaly):
    """The learning rate is 0, or next to 0 beside the highest that was logged or set.

    Args:
        rate: The highest of the recent ones.
        steps: The first and last step of those.
        warm_up: Why, if it is that.
    """

    rate: float
    steps: tuple[int, int]
    warm_up: WarmUp | None

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        rates = records.run.logged("learning_rate")
        now = recent(rates)
        if now.empty or len(now) < min(MIN_STEPS, len(records.run.steps)):
            return None
        highest = max(records.set_up.number("learning_rate", 0.0), float(rates.max()))
        rate = float(now.max())
        if rate > NO_RATE * highest:
            return None
        steps = span_of(now)
        since = first_of_trailing(rates <= rate) or steps[0]
        return cls(since, rate, steps, WarmUp.of(records))

    @property
    def evidence(self) -> str:
        evidence = f"The learning rate is {self.rate:.2g} ({steps_of(self.steps)}): the steps move nothing."
        return f"{evidence} {self.warm_up.sentence}" if self.warm_up else evidence

    @property
    def headline(self) -> str:
        return "Nothing is trained"

    def advice(self, wording: Wording) -> Proposal:
        if self.warm_up:
            return self.warm_up.advice(wording)
        return Change(f"a schedule and warm-up that keep {wording.rate_name} above 0", target="lr_scheduler_type")


@dataclass(frozen=True)
class LostToRounding(Anomaly):
    """Rounding to the weights' dtype takes most of a step.

    Args:
        left: The share of a step that is left.
    """

    left: Estimate

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        shares = records.run.values("update/surviving_share")
        if shares.empty or len(shares) < min(FEW_STEPS, len(records.run.steps)):
            return None
        if not recent(shares).mean() < MIN_SURVIVING_SHARE:
            return None
        since = first_of_trailing(shares < MIN_SURVIVING_SHARE) or int(shares.index[0])
        return cls(since, mean_of_recent(shares))

    @property
    def evidence(self) -> str:
        return f"Rounding to the weights' dtype leaves {format_estimate(self.left)} of a step."

    def advice(self, wording: Wording) -> Change:
        return Change(
            "weights in float32 (bf16=True computes in bf16), or a higher learning_rate", target="dtype of the weights"
        )


@dataclass(frozen=True)
class HardlyMoves(Anomaly):
    """All steps together can hardly have changed reward, by their KL.

    √(½ (Σ √KL)²), over the KL of a response at each step, bounds the reward's total change as a share of its range
    (Pinsker).

    Args:
        kl: Mean KL per response and step, in nats.
        num_steps: The number of steps.
        bound: The bound on the reward's change.
        rate: The last learning rate; nan if not logged.
        clip: The limit on the gradient's norm; nan if it hardly clips.
        norm: The median of that norm; nan likewise.
        warm_up: The warm-up that the run is still in.
    """

    kl: Estimate
    num_steps: int
    bound: float
    rate: float
    clip: float
    norm: float
    trained_parameters: int | None
    warm_up: WarmUp | None

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        kl, length = of_one_step(records.run, "measured/kl")["value"].align(records.length, join="inner")
        if len(kl) < MIN_STEPS:
            return None
        of_responses = (kl * length).clip(lower=0.0)
        bound = math.sqrt(0.5) * float(np.sqrt(of_responses).sum())
        if bound >= MIN_REWARD_MOVE or (records.mixed.reindex(kl.index) == 0).all():
            return None
        rates = records.run.logged("learning_rate")
        clip = records.set_up.number("max_grad_norm")
        norm = float(records.run.logged("grad_norm").median())
        is_clipped = 0 < clip < MIN_CLIPPING * norm
        return cls(
            since=int(kl.index[0]),
            kl=mean_of(list(of_responses)),
            num_steps=len(kl),
            bound=bound,
            rate=float(rates.iloc[-1]) if len(rates) else math.nan,
            clip=clip if is_clipped else math.nan,
            norm=norm if is_clipped else math.nan,
            trained_parameters=records.set_up.trained_parameters,
            warm_up=WarmUp.of(records),
        )

    @property
    def evidence(self) -> str:
        evidence = (
            f"The steps move nothing: KL is {format_estimate(self.kl)} nats per response and step, and all "
            f"{self.num_steps} together can have changed the mean reward by {self.bound:.2g} of its range at most."
        )
        return " ".join([evidence, *self._circumstances])

    @property
    def _circumstances(self) -> list[str]:
        """Sentences on what may be why."""
        parts = []
        if not math.isnan(self.rate):
            parts.append(f"the learning rate is {self.rate:.2g}")
        if not math.isnan(self.clip):
            parts.append(f"clipping leaves {self.clip / self.norm:.2g} of the gradient (norm {self.norm:.2g})")
        if self.trained_parameters is not None:
            parts.append(f"{self.trained_parameters:,} parameters are trained")
        sentences = [f"{capitalized(', '.join(parts))}."] if parts else []
        return [*sentences, self.warm_up.sentence] if self.warm_up else sentences

    def advice(self, wording: Wording) -> Proposal:
        if self.warm_up:
            return self.warm_up.advice(wording)
        is_sgd = str(wording.set_up.trainer("optim", "")).startswith("sgd")
        if is_sgd and not math.isnan(self.norm):  # its step is in proportion to the clipped gradient
            return wording.fields(max_grad_norm=rounded(self.norm))
        if wording.set_up.is_bounded:
            return wording.larger_steps().followed_by(", or more trained parameters")
        others = ", which adapts the rate; or a higher learning_rate, or more trained parameters"
        return wording.bounded_step().followed_by(others)

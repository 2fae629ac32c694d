"""What stands out in the sampler's settings: by them, another policy than the trained one draws the responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rl_training.options import is_number
from rl_training.records.pages.writing import format_estimate
from rl_training.records.report.proposals import Change
from rl_training.records.report.set_up import SetUp
from rl_training.records.report.standing_out.finding import Anomaly
from rl_training.records.report.standing_out.run_records import RunRecords
from rl_training.records.report.wording.base import Wording
from rl_training.records.table.trends import mean_of_recent
from rl_training.statistics.estimate import Estimate

# Settings that truncate the sampling distribution, with the value that truncates nothing.
CUTS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclass(frozen=True)
class OtherTemperature(Anomaly):
    """The setting of the sampler's temperature is another than that of the trained policy.

    Args:
        sampled, trained: Both temperatures.
        kl: Measured KL between both policies, in nats per token; nan if it was not measured.
    """

    sampled: float
    trained: float
    kl: Estimate

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        trained = records.set_up.number("temperature", 1.0)
        sampled = _sampler_settings(records.set_up).get("temperature")
        if not is_number(sampled) or sampled == trained:
            return None
        return cls(records.run.steps[0], sampled, trained, _recent_kl(records))

    @property
    def evidence(self) -> str:
        return (
            f"Responses are sampled at temperature {self.sampled:g}, and the policy that is trained has "
            f"{self.trained:g}.{_distance(self.kl)}"
        )

    def advice(self, wording: Wording) -> Change:
        return wording.sample_with(temperature=self.trained)


@dataclass(frozen=True)
class TokensLeftOut(Anomaly):
    """A setting of the sampler leaves tokens out that the policy would choose.

    Args:
        cuts: The settings that do.
        kl: Measured KL between both policies, in nats per token; nan if it was not measured.
    """

    cuts: Mapping[str, float]
    kl: Estimate

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        recorded = _sampler_settings(records.set_up)
        numbers = {name: recorded[name] for name in CUTS if is_number(recorded.get(name))}
        cuts = {
            name: value
            for name, value in numbers.items()
            if value != CUTS[name] and not (name == "top_k" and value < 0)  # -1 is vLLM's word for none
        }
        return cls(records.run.steps[0], cuts, _recent_kl(records)) if cuts else None

    @property
    def evidence(self) -> str:
        settings = ", ".join(f"{name}={value:g}" for name, value in self.cuts.items())
        left_out = "tokens that the policy would choose are left out."
        return f"Responses are sampled with {settings}: {left_out}{_distance(self.kl)}"

    def advice(self, wording: Wording) -> Change:
        return wording.sample_with(**{name: CUTS[name] for name in self.cuts})


def _sampler_settings(set_up: SetUp) -> dict[str, Any]:
    """Return the recorded settings of the sampler: those that it shares with the trainer, and its own."""
    return {name: set_up.trainer(name) for name in CUTS} | set_up.of_generation


def _recent_kl(records: RunRecords) -> Estimate:
    return mean_of_recent(records.run.values("sampler/kl"))


def _distance(kl: Estimate) -> str:
    return f" They are {format_estimate(kl)} nats per token apart (KL)." if kl.value > 0 else ""

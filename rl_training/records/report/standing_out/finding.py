"""A line of "What stands out", and the anomaly that it tells of: first found as numbers, then said."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

from rl_training.records.pages.writing import on_one_line
from rl_training.records.report.proposals import Advice, Proposal
from rl_training.records.report.standing_out.run_records import RunRecords
from rl_training.records.report.wording.base import Wording

# Names of findings, which the JSON of a report has too, and what each says.
NOT_A_NUMBER = "nan"  # the reward, or a reward function, is nan or infinite
LOOPHOLE = "loophole"  # steps raise the reward that is paid, and lower a reward function
DECAY = "decay"  # weight decay outweighs the gradients
BONUS = "bonus"  # the entropy bonus outweighs the reward
REFERENCE = "reference"  # the KL term allows next to no gain in reward
JUMP = "jump"  # the reward has jumped
EQUAL = "equal"  # all responses to every prompt earn the same
UNMIXED = "unmixed"  # responses to few prompts only earn unequal rewards
LENGTH = "length"  # responses grow with the reward
LARGE_STEP = "large_step"  # one step, or many, moved the policy too far
NO_STEP = "no_step"  # steps move nothing, or next to nothing
NOISE = "noise"  # the batch is far below the gradient's noise scale
ENDLESS = "endless"  # no response ends by itself
CUT_OFF = "cut_off"  # most responses are cut off at the maximum length
SAMPLER = "sampler"  # another policy than the trained one draws the responses

FOLLOWS_FROM_VERDICT = Advice("This follows from what the first line says.")


@dataclass(frozen=True)
class Anomaly(ABC):
    """Something that stands out in the records of a run. Subclasses have the numbers that show it.

    Args:
        since: The step since which it holds.
    """

    since: int

    @classmethod
    @abstractmethod
    def find(cls, records: RunRecords) -> Self | None:
        """Return the anomaly with its numbers; None if the records do not show it."""

    @property
    @abstractmethod
    def evidence(self) -> str:
        """Whole sentences with the numbers."""

    @abstractmethod
    def advice(self, wording: Wording) -> Proposal:
        """Return what to do about it, in the words of the trainer."""

    @property
    def headline(self) -> str:
        """What to say of a run of which it holds from the first step; "" if the verdict says more even then."""
        return ""


@dataclass(frozen=True)
class Finding:
    """A line of the report: what a rule has found, and what to do.

    Args:
        name: The name of its rule.
        since, evidence, headline: Those of the anomaly.
        proposal: What to do about it.
        follows_from_verdict: Whether nothing need be done about it, apart from what the first line of a report says.
    """

    name: str
    since: int
    evidence: str
    headline: str
    proposal: Proposal
    follows_from_verdict: bool = False

    @classmethod
    def of(cls, name: str, anomaly: Anomaly, wording: Wording) -> Finding:
        return cls(name, anomaly.since, anomaly.evidence, anomaly.headline, anomaly.advice(wording))

    @property
    def advice(self) -> Advice:
        """What to do about it, as whole sentences."""
        return FOLLOWS_FROM_VERDICT if self.follows_from_verdict else self.proposal.sentence(to_change="Setting")

    @property
    def text(self) -> str:
        return on_one_line(f"{self.evidence} Since step {self.since}. {self.advice.text}")

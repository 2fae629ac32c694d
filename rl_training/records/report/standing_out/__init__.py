"""What stands out in a run's records: lines with evidence, a first step and a setting. A report shows three at most.

They state what was measured and do not guess at causes. A line that explains others comes before them.

finding.py                                           a line, and the anomaly that it tells of
run_records.py, noise.py                             the records that rules look at, and how noisy rewards are
rewards.py, reward_jump.py, reward_hacks.py          anomalies of the rewards,
objective.py                                         of weight decay, the KL term and the entropy bonus,
responses.py, sampler.py, sampler_settings.py        of the responses and of what draws them,
no_step.py, large_step.py, small_batch.py            and of the steps

A new anomaly is a class in one of these files, and stands in the list of a rule below.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rl_training.records.report.standing_out import (
    large_step,
    no_step,
    objective,
    responses,
    reward_hacks,
    reward_jump,
    rewards,
    sampler,
    sampler_settings,
    small_batch,
)
from rl_training.records.report.standing_out.finding import (
    BONUS,
    CUT_OFF,
    DECAY,
    ENDLESS,
    EQUAL,
    JUMP,
    LARGE_STEP,
    LENGTH,
    LOOPHOLE,
    NO_STEP,
    NOISE,
    NOT_A_NUMBER,
    REFERENCE,
    SAMPLER,
    UNMIXED,
    Anomaly,
    Finding,
)
from rl_training.records.report.standing_out.run_records import RunRecords
from rl_training.records.table.series import Run, once_per_run

MAX_SHOWN = 3
# Consequences of large or wrong steps: left out if a finding explains them.
EFFECTS = (LARGE_STEP, EQUAL, UNMIXED, ENDLESS, CUT_OFF, NOISE)
# Findings that explain a bad verdict. What to do about the first of these comes before a change of the loss.
CAUSES = (
    # One term of the update outweighs the reward, so that nothing else matters.
    DECAY, BONUS,
    # After one event, nothing is as it was before.
    LARGE_STEP, JUMP,
    # Nothing can be learned: steps do not move, or no advantage differs from 0.
    NO_STEP, EQUAL,
    # Little can be learned, from responses that are cut off or earn the same.
    ENDLESS, CUT_OFF, UNMIXED,
    # Something is learned, by a gradient that is off, noisy or held back.
    SAMPLER, NOISE, REFERENCE,
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """What a rule looks for, and what its finding means for the rest of the report.

    Args:
        name: Of its finding.
        anomalies: What it looks for; the first that a run has is the finding.
        explains: Names of later findings that this one explains. They are left out.
        is_of_whole_run: Whether it explains them whenever they began: settings and rewards come before all steps.
        is_symptom: Whether it is no cause, but an effect, once reward or entropy was lost.
        precedes_batch_size: Whether it comes before the size of the batch.
    """

    name: str
    anomalies: tuple[type[Anomaly], ...]
    explains: tuple[str, ...] = ()
    is_of_whole_run: bool = False
    is_symptom: bool = False
    precedes_batch_size: bool = False

    def find(self, records: RunRecords) -> Finding | None:
        """Return the finding; None if the records show no anomaly of this rule."""
        for kind in self.anomalies:
            anomaly = kind.find(records)
            if anomaly is not None:
                return Finding.of(self.name, anomaly, records.wording)
        return None


# In the order in which findings are shown. The rules were fixed on the trainings of seed 0 of
# benchmarks/planted_faults.py, but for what benchmarks/README.md names; it has how often they name those of seed 1.
RULES = (
    Rule(
        NOT_A_NUMBER,
        (rewards.NotANumber,),
        explains=(*EFFECTS, NO_STEP),
        is_of_whole_run=True,
        precedes_batch_size=True,
    ),
    Rule(LOOPHOLE, (reward_hacks.FunctionLowered,)),
    Rule(DECAY, (objective.WeightDecayWins,), explains=EFFECTS, is_of_whole_run=True),
    Rule(BONUS, (objective.BonusWins,), explains=EFFECTS, is_of_whole_run=True),
    Rule(JUMP, (reward_jump.RewardJumps,), explains=EFFECTS, precedes_batch_size=True),
    Rule(
        LARGE_STEP,
        (
            large_step.StepBreaksReward,
            large_step.StepExceedsEntropy,
            large_step.ManyLargeSteps,
            large_step.FirstOrderFails,
            large_step.RewardIsGone,
        ),
        explains=(*EFFECTS, JUMP),
        precedes_batch_size=True,
    ),
    Rule(EQUAL, (rewards.AllEqual,), is_symptom=True, precedes_batch_size=True),
    Rule(ENDLESS, (responses.NoResponseEnds,)),
    Rule(CUT_OFF, (responses.MostCutOff,)),
    Rule(UNMIXED, (rewards.HardlyMixed,), is_symptom=True),
    Rule(
        SAMPLER,
        (
            sampler_settings.OtherTemperature,
            sampler_settings.TokensLeftOut,
            sampler.NotDrawn,
            sampler.SamplerLeavesOut,
            sampler.SamplerIsBehind,
        ),
    ),
    Rule(NO_STEP, (no_step.NoRate, no_step.LostToRounding, no_step.HardlyMoves), precedes_batch_size=True),
    Rule(REFERENCE, (objective.ReferenceWins,)),
    Rule(NOISE, (small_batch.StepFollowsNoise,)),
    Rule(LENGTH, (reward_hacks.LengthGrows,)),
)
BY_NAME = {rule.name: rule for rule in RULES}


@once_per_run
def standing_out(run: Run) -> list[Finding]:
    """Return what stands out, explanations first, without what they explain; of one target, the first finding alone."""
    records = RunRecords.of(run)
    by_target = dict[str, Finding]()
    for rule in RULES:
        finding = rule.find(records)
        if finding is not None and not any(_explains(first, finding) for first in by_target.values()):
            by_target.setdefault(finding.proposal.target, finding)
    return list(by_target.values())


def shown(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that a report has room for: the first ones, and among them what explains a bad verdict."""
    first = list(findings[:MAX_SHOWN])
    cause = first_cause(findings)
    return first if cause is None or cause in first else [*first[:-1], cause]


def rule_of(finding: Finding) -> Rule:
    """Return the rule of a finding."""
    return BY_NAME[finding.name]


def _explains(cause: Finding, finding: Finding) -> bool:
    rule = rule_of(cause)
    return finding.name in rule.explains and (rule.is_of_whole_run or cause.since < finding.since)


def first_cause(findings: Iterable[Finding]) -> Finding | None:
    """Return the finding that explains a bad verdict before the others; None without one."""
    causes = [finding for finding in findings if finding.name in CAUSES and not finding.follows_from_verdict]
    return min(causes, key=lambda finding: CAUSES.index(finding.name), default=None)

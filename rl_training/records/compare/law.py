"""Groups → the fit of R = −a e^H + b to each, from checkpoints that were evaluated or else from training itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.reward_entropy import MIN_POINTS, RewardLaw, fit_reward_law
from rl_training.records.compare.groups import Group
from rl_training.records.evaluated import EVALUATIONS, read_step
from rl_training.records.report.series import finite

BLOCKS = 10  # of consecutive steps: one step's batch is too noisy to be a point


class Point(NamedTuple):
    """Entropy (nats per token) and mean reward of a policy, at a step."""

    step: int
    entropy: float
    reward: float


@dataclass(frozen=True)
class FittedLaw:
    """The fit to a group's points, and how well its first half predicts the second.

    law, first   None where there is no fit; `reason` and `miss` then say why
    miss         mean of the rewards of the second half minus what the first half's curve gives for their entropies
    most         that a response can earn; nan where no record says so
    """

    group: Group
    source: str
    points: list[Point]
    law: RewardLaw | None
    reason: str
    first: RewardLaw | None
    miss: Estimate
    most: float = math.nan

    @property
    def leads_too_high(self) -> bool:
        """Whether the curve's ceiling exceeds the largest possible reward: then it does not hold down to H = 0."""
        return self.law is not None and self.law.ceiling.value > self.most


def fit_law(group: Group) -> FittedLaw:
    """Returns the fit to the points of all runs of the group."""
    points, source, most = _evaluated(group) or _trained(group)
    law, reason = _fit(points)
    steps = sorted({point.step for point in points})
    early = set(steps[: (len(steps) + 1) // 2])
    first, why = _fit([point for point in points if point.step in early])
    late = [point for point in points if point.step not in early]
    miss = Estimate.missing(why or "no point lies in the second half of the steps")
    if first and late:
        miss = first.mean_miss([p.entropy for p in late], [p.reward for p in late])
    return FittedLaw(group, source, points, law, reason, first, miss, most)


def _fit(points: Sequence[Point]) -> tuple[RewardLaw | None, str]:
    try:
        return fit_reward_law([p.entropy for p in points], [p.reward for p in points]), ""
    except ValueError as error:
        return None, str(error)


def _evaluated(group: Group) -> tuple[list[Point], str, float] | None:
    """Returns the evaluated checkpoints, of the evaluation that has most of them, and the most that is earned there.

    None where there are too few.
    """
    by_evaluation: dict[str, list[Point]] = {}
    for member in group.members:
        for name, metrics in sorted(member.run.of_checkpoints.items()):
            entropies, rewards = (finite(metrics.get(metric, {})) for metric in ("entropy/token", "reward"))
            points = [Point(s, entropies[s].value, rewards[s].value) for s in sorted(rewards) if s in entropies]
            by_evaluation.setdefault(name, []).extend(points)
    name = max(by_evaluation, key=lambda evaluation: len(by_evaluation[evaluation]), default="")
    if len(by_evaluation.get(name, [])) < MIN_POINTS:
        return None
    folders = [member.run.folder / EVALUATIONS / name for member in group.members]
    found = (read_step(folder, point.step) for folder in folders for point in by_evaluation[name])
    ranges = (content.get("reward_range") for content in found if content)
    most = next((float(known[1]) for known in ranges if known), math.nan)
    return by_evaluation[name], f"checkpoints, evaluation “{name}”", most


def _trained(group: Group) -> tuple[list[Point], str, float]:
    """Returns means over blocks of logged steps."""
    points, sizes = [], set()
    for member in group.members:
        reward, entropy = member.run.logged("reward"), member.run.token_entropy()
        steps = [Point(step, entropy[step], reward[step]) for step in reward if step in entropy]
        size = max(math.ceil(len(steps) / BLOCKS), 1)
        sizes.add(size)
        for start in range(0, len(steps) - size + 1, size):
            block = steps[start : start + size]
            _, entropy_there, reward_there = np.mean(block, axis=0)
            points.append(Point(block[-1].step, float(entropy_there), float(reward_there)))
    averaged = f"{' or '.join(map(str, sorted(sizes)))} step{'s' * (max(sizes) > 1)}"
    return points, f"training, means over {averaged}", group.members[0].most_reward

"""What is checked at each measured step, from its sequences and gradients, and remembered from step to step.

    check          at which measured steps      what it reads                     what is nan if it fails
    PaddingCheck   1, 10, 100, …                scores of a few responses, with   what takes the responses for samples
                                                and without padding               of the policy: all predictions
    TermsCheck     1, 2, 4, 8, 16, 32, 48, …    a gradient of folds, and the      what takes the loss for one of scores
                   if a probe needs it; each    same recomputed from the loss's   alone: `delta_reward/forward`; with
                   one with recomputed folds    weights                           recomputed folds `forward`, the noise
    RewardCheck    each one with new groups     the mean rewards of the groups    every change and gap of the reward

Each has `check(…)`: first what it reads of the step, then what it calculates with (policy and ranks, ranks, or passes).
It returns the reason why something cannot be measured, or None, and is collective and the same on every rank. `reason`
is what the steps so far have shown. A step that is not taken leaves nothing behind: its responses may come again, and
would be evidence twice. Checks of one step alone are elsewhere: gradient_check.py, copied_groups.py,
verifier.py, gradient_witness.py and step/score_check.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_training.engine.padding_check import PaddingCheck
from rl_training.engine.reward_check import RewardCheck
from rl_training.engine.terms_check import TermsCheck
from rl_training.parallel.ranks import Ranks
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import Batch
from rl_training.step.reasons import Reasons


@dataclass
class StepChecks:
    """The checks of a training run, each with what earlier steps have shown."""

    name = "checks"  # key of its state in a checkpoint

    padding: PaddingCheck = field(default_factory=PaddingCheck)
    terms: TermsCheck = field(default_factory=TermsCheck)
    rewards: RewardCheck = field(default_factory=RewardCheck)
    _at_begin: tuple[PaddingCheck, TermsCheck, RewardCheck] | None = None  # set within a measured step

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StepChecks:
        """Return the checks that continue from a state."""
        return cls(terms=TermsCheck(state["count"], state["distance"]), rewards=RewardCheck(state["log_chance"]))

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed run needs: the arguments of TermsCheck and RewardCheck by name."""
        return {"count": self.terms.count, "distance": self.terms.distance, "log_chance": self.rewards.log_chance}

    def begin(self) -> None:
        """Begin a step."""
        self._at_begin = copy.deepcopy((self.padding, self.terms, self.rewards))

    def finish(self, was_taken: bool) -> None:
        """End a step, and forget what it has shown if it was not taken. Not collective."""
        if self._at_begin is not None and not was_taken:
            self.padding, self.terms, self.rewards = self._at_begin
        self._at_begin = None

    def relative_rewards(self, batch: Batch, reasons: Reasons, ranks: Ranks) -> Unavailable | None:
        """Return the reason why rewards count as relative to their group, or None. Collective.

        Only independent groups are evidence: copies, and groups that an earlier step has shown, are not counted again.
        """
        if reasons.split_prompts:
            return None
        is_repeated = reasons.reused or batch.copies.reason
        return self.rewards.reason if is_repeated else self.rewards.check(batch.rollout, ranks)

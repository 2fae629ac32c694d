"""Checks that a response's log-probability does not depend on the padding to the left of its prompt."""

from __future__ import annotations

import torch

from rl_training.parallel.ranks import Ranks
from rl_training.policy.policy import Policy
from rl_training.policy.precision import SAME_SCORES, SAME_SCORES_ROUNDED
from rl_training.policy.rollout import Rollout, first_tokens
from rl_training.policy.rotary import depends_on_longest_row
from rl_training.statistics.unavailable import Unavailable

ROWS = 4  # responses per rank: those with the most padding
TOKENS = 128  # the first tokens of each response
PADDING_MATTERS = Unavailable(
    "padding_matters",
    "a response's log-probabilities change with the padding on the left of its prompt (absolute position "
    "embeddings?), so sampling, training and measurement see different policies",
    fix="use a model with rotary positions",
)


class PaddingCheck:
    """Compares a few responses' scores with and without padding, at measured steps 1, 10, 100 and so on.

    It uses the mean difference over tokens, not the largest: in bf16, one of thousands of tokens is always far off.
    """

    def __init__(self) -> None:
        self._count = 0
        self._next = 1
        self.reason: Unavailable | None = None

    def check(self, rollout: Rollout, policy: Policy, ranks: Ranks) -> Unavailable | None:
        """Return the reason why padding matters for this model, or None; the same on every rank. Collective."""
        self._count += 1
        if self.reason or self._count < self._next or depends_on_longest_row(policy.model):
            # For models with such tables, this cannot tell padding from length: step/score_check.py checks them.
            return self.reason
        self._next *= 10
        rollout = first_tokens(rollout, TOKENS)
        rows = rollout.prompt_mask.sum(dim=1).argsort(stable=True)[:ROWS]
        with policy.measuring():
            unpadded = policy.scorer.score(rollout, rows, graph=False)
            padded = policy.scorer.score_padded(rollout, rows)
        mask = unpadded.mask.bool()
        difference = (unpadded.logps - padded.logps[:, : mask.shape[1]])[mask].double().abs()
        total, count = ranks.reduce(torch.stack([difference.sum(), mask.sum().double()])).tolist()
        tolerance = SAME_SCORES_ROUNDED if policy.scorer.rounding_reason else SAME_SCORES
        self.reason = PADDING_MATTERS if count and not total / count <= tolerance else None
        return self.reason

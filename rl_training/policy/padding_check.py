"""Whether a response's log-probability is independent of the padding on the left of its prompt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_training.policy.policy import Policy
from rl_training.policy.rollout import Rollout, first_tokens
from rl_training.policy.rotary import depends_on_longest_row

ROWS = 4  # of each rank, those with the most padding
TOKENS = 128  # the first ones of each
LIMIT, LIMIT_ROUNDED = 0.01, 0.1  # of the mean difference per token; the second for weights below fp32
PADDING_MATTERS = (
    "a response's log-probabilities change with the padding on the left of its prompt (absolute position "
    "embeddings?), so sampling, training and measurement see different policies: use a model with rotary positions"
)


class PaddingCheck:
    """Scores a few responses with and without their padding, at measured steps 1, 10, 100, …

    A mean over tokens, not the largest difference: in bf16 one of thousands of tokens is always far off.
    """

    def __init__(self) -> None:
        self._count, self._next = 0, 1
        self._reason = ""

    def limit(self, rollout: Rollout, policy: Policy, reduce: Callable[[Tensor], Tensor]) -> str:
        """Return why the padding matters, "" if it does not. A collective: all ranks get the same answer."""
        self._count += 1
        if self._reason or self._count < self._next or depends_on_longest_row(policy.model):
            return self._reason  # the last of these do not tell padding from length: score_check.py does
        self._next *= 10
        rollout = first_tokens(rollout, TOKENS)
        rows = rollout.prompt_mask.sum(dim=1).argsort(stable=True)[:ROWS]
        with policy.measuring():
            alone = policy.scorer.score(rollout, rows, graph=False)
            padded = policy.scorer.score_padded(rollout, rows)
        mask = alone.mask.bool()
        difference = (alone.logps - padded.logps[:, : mask.shape[1]])[mask].double().abs()
        total, count = reduce(torch.stack([difference.sum(), mask.sum().double()])).tolist()
        limit = LIMIT_ROUNDED if policy.scorer.rounding_reason else LIMIT
        self._reason = PADDING_MATTERS if count and not total / count <= limit else ""
        return self._reason

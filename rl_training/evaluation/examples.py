"""Two example metrics to copy and adapt: entropy by token position, and entropy of right and wrong responses.

Use them with:

    evaluate.py run=RUN 'metric=[entropy_by_correctness,entropy_by_position]'
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np


def entropy_by_correctness(
    *, rewards: Sequence[float], entropies: Sequence[np.ndarray], right_reward: float = 1.0, **others: object
) -> dict[str, float]:
    """Return entropy per token, in nats, of the right and of the wrong responses to a prompt, and the difference.

    The difference compares responses to the same prompt. It is nan if all of them are right, or all wrong.
    """
    right = [h for h, reward in zip(entropies, rewards, strict=True) if reward >= right_reward]
    wrong = [h for h, reward in zip(entropies, rewards, strict=True) if reward < right_reward]
    per_token = [float(np.concatenate(group).mean()) if group else math.nan for group in (right, wrong)]
    return {"right": per_token[0], "wrong": per_token[1], "wrong_minus_right": per_token[1] - per_token[0]}


def entropy_by_position(
    *, entropies: Sequence[np.ndarray], edges: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), **others: object
) -> dict[str, float]:
    """Return entropy per token, in nats, by the token's position in its response: first, second, 3–4, 5–8 and so on.

    Args:
        edges: Last position of each range, counted from 1. Positions beyond the last edge form one more range.
    """
    ends = [0, *edges, max(map(len, entropies))]
    by_range = {}
    for before, last in itertools.pairwise(ends):
        tokens = np.concatenate([h[before:last] for h in entropies])
        if len(tokens):
            by_range[f"from_{before + 1:03d}"] = float(tokens.mean())
    return by_range

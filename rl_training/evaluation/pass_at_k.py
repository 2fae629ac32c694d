"""How often several responses to one prompt include a right answer: pass@k and majority vote.

Of n sampled responses, c are right. The chance that k of them, drawn without replacement, include a right one is

    pass@k = 1 − C(n−c, k) / C(n, k) = 1 − Π_{i=n−c+1}^{n} (1 − k/i),

which is unbiased for 1 − (1−p)^k, the chance that k fresh responses do; 1 − (1 − c/n)^k is not. Being unbiased for each
prompt, it is also unbiased in the mean over prompts.

Source: Chen et al. 2021, "Evaluating large language models trained on code", equation 1 (arXiv:2107.03374).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_training.errors import UserError


def pass_at_k(num_right: Tensor, num_responses: int, k: int) -> Tensor:
    """Return the unbiased estimate of pass@k for each prompt, (P,) fp64, between 0 and 1.

    Args:
        num_right: c, how many of each prompt's responses are right, (P,).
        num_responses: n, the same for all prompts.
        k: 1 … n.

    Raises:
        UserError: If k is not in 1 … n. Fewer than k responses give no unbiased estimate.

    Example: two right responses of four, k = 2: 1 − C(2,2)/C(4,2) = 5/6.
    """
    if not 1 <= k <= num_responses:
        raise UserError(f"pass@{k} needs k between 1 and the number of responses per prompt, {num_responses}")
    i = torch.arange(1, num_responses + 1, dtype=torch.float64, device=num_right.device)
    taken = i > (num_responses - num_right).unsqueeze(1)  # (P, n), the factors of each prompt's product
    return 1 - torch.where(taken, 1 - k / i, 1.0).prod(dim=1)


def majority_vote(answers: Sequence[str | None], is_right: Sequence[bool]) -> float:
    """Return the chance that the most frequent answer is right; ties are broken at random.

    Args:
        answers: The answers of one prompt's responses. None does not vote; without any vote the chance is 0.
        is_right: Whether each response is right. If responses with the same answer differ in this, their share of right
            ones counts.

    Example: answers 3, 3, 7, 7, 5 with 7 right: 1/2.
    """
    votes: dict[str, list[bool]] = {}
    for answer, right in zip(answers, is_right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(right)
    most = max((len(voters) for voters in votes.values()), default=0)
    winners = [sum(voters) / most for voters in votes.values() if len(voters) == most]
    return sum(winners) / len(winners) if winners else 0.0

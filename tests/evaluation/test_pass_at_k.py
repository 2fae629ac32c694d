"""pass@k and the majority vote, compared with enumeration and a plain twin."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from rl_training.evaluation.pass_at_k import majority_vote, pass_at_k


def test_pass_at_k_is_the_share_of_subsets_with_a_right_response() -> None:
    for n in range(1, 7):
        for right in range(n + 1):
            outcomes = [True] * right + [False] * (n - right)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(outcomes, k))
                share = sum(any(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(torch.tensor([right]), n, k).item() == pytest.approx(share, abs=1e-14)


def test_pass_at_k_of_many_responses_neither_overflows_nor_underflows() -> None:
    twin = 1 - math.comb(990, 500) / math.comb(1000, 500)
    assert pass_at_k(torch.tensor([10]), 1000, 500).item() == pytest.approx(twin, rel=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_k_above_the_number_of_responses_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"^pass@{k} .* 4$"):
        pass_at_k(torch.tensor([1]), 4, k)


def drawn_majority(answers: list[str | None], right: set[str]) -> float:
    """Return the probability that the vote is right if ties are broken at random: any most frequent answer may win."""
    voters = [answer for answer in answers if answer is not None]
    winners = {a for a in voters if voters.count(a) == max(map(voters.count, voters))}
    return sum(winner in right for winner in winners) / len(winners) if winners else 0.0


def test_the_majority_equals_the_plain_twin_for_all_votes_of_five() -> None:
    for votes in itertools.product(["3", "7", "9", None], repeat=5):
        answers = list(votes)
        assert majority_vote(answers, [a == "7" for a in answers]) == drawn_majority(answers, {"7"})

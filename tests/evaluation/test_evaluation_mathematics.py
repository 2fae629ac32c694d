"""pass@k, majority vote, errors over prompts and exact divergences, against slow plain twins and enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import reference
import torch

from rl_training.evaluation.next_token import CHUNK, divergences
from rl_training.statistics.pass_at_k import majority_vote, pass_at_k
from rl_training.statistics.prompt_means import mean_over_prompts, ratio_over_prompts, share_over_prompts

# --- pass@k -----------------------------------------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_response() -> None:
    for n in range(1, 7):
        for right in range(n + 1):
            outcomes = [True] * right + [False] * (n - right)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(outcomes, k))
                share = sum(any(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(torch.tensor([right]), n, k).item() == pytest.approx(share, abs=1e-14)


def test_pass_at_k_of_many_responses_neither_over_nor_underflows() -> None:
    twin = 1 - math.comb(990, 500) / math.comb(1000, 500)
    assert pass_at_k(torch.tensor([10]), 1000, 500).item() == pytest.approx(twin, rel=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_k_beyond_the_responses_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} needs k between 1 and the number of responses per prompt, 4"):
        pass_at_k(torch.tensor([1]), 4, k)


# --- majority ---------------------------------------------------------------------------------------------------------


def drawn_majority(answers: list[str | None], right: set[str]) -> float:
    """The vote by drawing: every voter's answer that nobody outnumbers is a possible winner."""
    voters = [answer for answer in answers if answer is not None]
    winners = {a for a in voters if voters.count(a) == max(map(voters.count, voters))}
    return sum(winner in right for winner in winners) / len(winners) if winners else 0.0


def test_majority_is_that_of_the_plain_twin_for_all_votes_of_five() -> None:
    for votes in itertools.product(["3", "7", "9", None], repeat=5):
        answers = list(votes)
        assert majority_vote(answers, [a == "7" for a in answers]) == drawn_majority(answers, {"7"})


# --- errors over prompts ----------------------------------------------------------------------------------------------


def test_standard_error_of_a_mean_by_hand() -> None:
    estimate = mean_over_prompts(torch.tensor([1.0, 2.0, 6.0]))
    assert (estimate.value, estimate.num_samples) == (3, 3)
    assert estimate.stderr == pytest.approx(math.sqrt((4 + 1 + 9) / (3 * 2)))


def test_a_prompt_without_a_value_is_left_out_and_without_any_there_is_a_reason() -> None:
    estimate = mean_over_prompts(torch.tensor([1.0, math.nan, 3.0]))
    assert (estimate.value, estimate.num_samples) == (2, 2)
    assert mean_over_prompts(torch.tensor([math.nan])).reason == "there is no finite value"
    alone = mean_over_prompts(torch.tensor([2.0]))
    assert (alone.value, alone.reason) == (2, "one value has no error")
    assert math.isnan(alone.stderr)


def test_an_infinite_value_makes_the_mean_infinite_and_its_error_unknown() -> None:
    """As a divergence is of a prompt at which the first model rules out what the policy says."""
    estimate = mean_over_prompts(torch.tensor([math.inf, 1.0]))
    assert (estimate.value, estimate.num_samples) == (math.inf, 2)
    assert math.isnan(estimate.stderr)


def test_values_that_are_all_the_same_have_no_error() -> None:
    """0.1 + 0.1 + 0.1 is not 0.3 to the last bit."""
    estimate = mean_over_prompts(torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64))
    assert (estimate.value, estimate.stderr) == (0.1, 0.0)


def test_standard_error_of_a_ratio_is_the_jackknife_over_prompts() -> None:
    a, b = [3.0, 1.0, 4.0, 1.0, 5.0], [2.0, 7.0, 1.0, 8.0, 2.0]
    left_out = [(sum(a) - x) / (sum(b) - y) for x, y in zip(a, b, strict=True)]
    mean = sum(left_out) / 5
    twin = math.sqrt(4 / 5 * sum((x - mean) ** 2 for x in left_out))
    estimate = ratio_over_prompts(torch.tensor(a), torch.tensor(b))
    assert estimate.value == pytest.approx(14 / 20)
    assert estimate.stderr == pytest.approx(twin, rel=1e-12)


def test_shares_of_none_and_of_all_have_wilsons_interval() -> None:
    """Z² = 3.8415: of 20 of 20 it is 20/23.8415 to 1, of 0 of 10 0 to 3.8415/13.8415."""
    assert share_over_prompts(torch.ones(20)).interval == (pytest.approx(0.83887, abs=1e-5), 1.0)
    assert share_over_prompts(torch.zeros(10)).interval == (0.0, pytest.approx(0.27754, abs=1e-5))
    low, high = share_over_prompts(torch.full((20,), 3.0), least=-1.0, most=3.0).bounds()
    assert (low, high) == (pytest.approx(-1 + 4 * 0.83887, abs=1e-4), 3.0)
    assert share_over_prompts(torch.ones(1)).interval is None


@pytest.mark.parametrize("values", [[1.0] * 9 + [0.0], [0.0, 0.25, 0.0, 0.0], [0.0, 1.0]], ids=str)
def test_a_share_whose_bar_would_leave_0_to_1_has_the_ends_that_solve_wilsons_equation(values: list[float]) -> None:
    share = share_over_prompts(torch.tensor(values))
    mean = mean_over_prompts(torch.tensor(values))
    assert (share.value, share.stderr) == (mean.value, mean.stderr)
    assert share.interval is not None
    quantile = mean.half_width() / mean.stderr
    draws = mean.value * (1 - mean.value) / mean.stderr**2
    for end in share.interval:
        assert 0 <= end <= 1
        assert (mean.value - end) ** 2 == pytest.approx(quantile**2 * end * (1 - end) / draws)


def test_an_interval_scales_with_the_range_of_the_values() -> None:
    share = torch.tensor([1.0] * 9 + [0.0])
    low, high = share_over_prompts(share).bounds()
    assert share_over_prompts(4.0 * share - 1.0, least=-1.0, most=3.0).bounds() == pytest.approx(
        (4 * low - 1, 4 * high - 1)
    )


def test_a_share_whose_bar_stays_within_0_to_1_keeps_it() -> None:
    share = share_over_prompts(torch.tensor([0.0, 1.0] * 10))
    assert share.interval is None
    assert share.bounds() == (share.value - share.half_width(), share.value + share.half_width())


def test_the_intervals_of_shares_near_1_hold_the_truth_in_at_least_93_of_100_cases() -> None:
    """2000 evaluations of 20 prompts that are right with chance .95; value ± t se holds it in 63 of 100."""
    draws = (torch.rand(2000, 20, generator=torch.Generator().manual_seed(0)) < 0.95).double()
    shares = [share_over_prompts(row) for row in draws]
    held = sum(low <= 0.95 <= high for low, high in (share.bounds() for share in shares))
    plain = sum(abs(share.value - 0.95) <= share.half_width() for share in shares)
    assert held / 2000 > 0.93
    assert plain / 2000 < 0.70


# --- entropies and divergences ----------------------------------------------------------------------------------------


def test_divergences_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, other = (3 * torch.randn(20, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    found = divergences(logits, other)
    for row in range(20):
        p, q = (reference.log_softmax(table[row].tolist()) for table in (logits, other))
        assert found[row].item() == pytest.approx(
            sum(math.exp(x) * (x - y) for x, y in zip(p, q, strict=True)), abs=1e-12
        )


@pytest.mark.parametrize("scale", [1.0, 5.0, 20.0])
def test_divergences_of_fp32_logits_over_a_whole_vocabulary_are_those_in_fp64_to_1e_7_nats(scale: float) -> None:
    """From a near-uniform distribution to one that is all but certain; the twin has every term in fp64."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(8, 151_936, generator=generator)
    other = logits + 0.05 * torch.randn(logits.shape, generator=generator)
    p, q = (table.double().log_softmax(dim=-1) for table in (logits, other))
    torch.testing.assert_close(divergences(logits, other), (p.exp() * (p - q)).sum(dim=-1), rtol=0, atol=1e-7)


def test_a_policy_has_no_divergence_from_itself_also_where_it_rules_tokens_out() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0], [2.0, 0.5, -math.inf]])
    assert divergences(logits, logits).tolist() == [0, 0]


def test_divergences_do_not_depend_on_how_positions_are_split() -> None:
    width = CHUNK // 2
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).repeat(1, width // 5 + 1)[:, :width]
    together = divergences(logits, logits.flip(0))
    for row in range(3):
        assert divergences(logits[row : row + 1], logits.flip(0)[row : row + 1]).item() == together[row].item()

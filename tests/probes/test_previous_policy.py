"""The policy before a step, estimated from responses sampled after it: by enumeration, and term by term."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import reference
import torch
from table_policies import OLD, Response, Table, as_scores, draws, moved, ragged_scores

from rl_training.probes.previous_policy import differences_before

REWARDS = {response: random.Random(number).gauss(0, 1) for number, response in enumerate(reference.RESPONSES)}
BEFORE, SAMPLER = moved(OLD, 0.7), moved(OLD, -0.4)  # far apart, so all orders matter


def plain_terms(response: Response, others: list[Response]) -> list[float]:
    """Return the terms of one response from SAMPLER, whose prompt has these other responses."""
    (logps, *_), (h, *h_of_others) = ragged_scores(OLD, [response, *others])
    (logps_before,), (h_before,) = ragged_scores(BEFORE, [response])
    (logps_of_sampler,), _ = ragged_scores(SAMPLER, [response])
    reward, rewards = REWARDS[response], [REWARDS[other] for other in others]
    return reference.terms_before(logps, h, logps_before, h_before, reward, h_of_others, rewards, logps_of_sampler)


def in_order(plain: list[float]) -> list[float]:
    """Return the plain terms in the order of `differences_before`, with the reward's last."""
    entropy, length, reward, divergence, log_weight = plain
    return [entropy, length, divergence, log_weight, reward]


def terms(responses: list[Response], prompts: list[int], rows: list[int], sampler: Table = OLD) -> list[list[float]]:
    rewards = torch.tensor([REWARDS[response] for response in responses], dtype=torch.float64)
    before = as_scores(BEFORE, [responses[row] for row in rows])
    logs = (as_scores(OLD, responses).logps - as_scores(sampler, responses).logps).nan_to_num()
    numbers = torch.tensor(rows), torch.tensor(prompts)
    return differences_before(as_scores(OLD, responses), before, *numbers, rewards.unsqueeze(1), logs).tolist()


def test_terms_equal_the_definition_with_padding_and_prompts_of_different_sizes() -> None:
    responses, prompts = [*draws(6, seed=1), (reference.EOS,)], [4, 2, 4, 2, 2, 4, 2]
    assert len({len(response) for response in responses}) == 3
    for row, got in zip([5, 0, 1], terms(responses, prompts, [5, 0, 1], SAMPLER), strict=True):
        others = [r for i, r in enumerate(responses) if i != row and prompts[i] == prompts[row]]
        assert got == pytest.approx(in_order(plain_terms(responses[row], others)), abs=1e-12)


@pytest.mark.parametrize("sampler", [OLD, SAMPLER])
def test_the_mean_over_all_pairs_of_responses_is_exact_for_a_step_of_any_size(sampler: Table) -> None:
    """One response of each pair is scored again. The mean is weighted by the pair's probability."""
    pairs = list(itertools.product(reference.RESPONSES, repeat=2))
    chances = torch.tensor([
        math.exp(sum(reference.sequence_logp(sampler, response) for response in pair)) for pair in pairs
    ])  # fmt: skip
    flat = [response for pair in pairs for response in pair]
    terms_of_pairs = terms(flat, [i // 2 for i in range(len(flat))], list(range(0, len(flat), 2)), sampler)
    mean = (chances.double() @ torch.tensor(terms_of_pairs, dtype=torch.float64)).tolist()
    now, before = reference.exact(OLD), reference.exact(BEFORE)
    logps = [[reference.sequence_logp(table, r) for table in (OLD, BEFORE)] for r in reference.RESPONSES]
    reward = sum((math.exp(b) - math.exp(a)) * REWARDS[r] for (a, b), r in zip(logps, reference.RESPONSES, strict=True))
    divergence = sum(math.exp(a) * (a - b) for a, b in logps)
    assert abs(before.entropy - now.entropy) > 0.05
    assert [*mean[:3], mean[4]] == pytest.approx(
        [before.entropy - now.entropy, before.length - now.length, divergence, reward], abs=1e-6
    )


def test_the_documented_example_gives_the_stated_values() -> None:
    scores = as_scores(OLD, [(reference.EOS,)] * 2)
    scores.entropies[:, 0] = 1.0
    before = as_scores(OLD, [(reference.EOS,)])
    before.entropies[0, 0], before.logps[0, 0] = 3.0, scores.logps[0, 0] + math.log(2)
    arguments = torch.tensor([0]), torch.zeros(2).long(), torch.tensor([[1.0], [0.0]]), torch.zeros(2, 3)
    (terms_of_rows,) = differences_before(scores, before, *arguments).tolist()
    assert terms_of_rows == pytest.approx([2.0, 0.0, 1.0 - math.log(2), math.log(2), 1.0])


def test_responses_without_a_reward_or_without_another_to_compare_with_have_no_reward_term() -> None:
    """First prompt: one of three has no reward, and the other two are compared. Second prompt: one of two has none."""
    responses, prompts = draws(5, seed=2), [0, 0, 0, 1, 1]
    rewards = torch.tensor([1.0, math.nan, 3.0, 2.0, math.nan], dtype=torch.float64)
    scores, before, every = as_scores(OLD, responses), as_scores(BEFORE, responses), torch.arange(5)
    terms_of_rows = differences_before(
        scores, before, every, torch.tensor(prompts), rewards.unsqueeze(1), torch.zeros_like(scores.logps)
    )
    more_likely = [
        math.exp(reference.sequence_logp(BEFORE, r) - reference.sequence_logp(OLD, r)) - 1 for r in responses
    ]
    assert terms_of_rows[:, 4].tolist() == pytest.approx([-2.0 * more_likely[0], 0.0, 2.0 * more_likely[2], 0.0, 0.0])

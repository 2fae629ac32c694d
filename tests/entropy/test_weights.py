"""Claims on the entropy gradient's surrogate weights: exact in expectation, and independent of padding and order."""

import itertools
import math
from collections.abc import Callable

import pytest
import reference
import torch
from ranks_in_threads import on_two_ranks
from torch import Tensor

from rl_training.entropy.weights import normalised_ratios, prefix_ratios, surrogate_weights

GARBAGE = 1e30  # the value wherever the mask is 0
TABLE = [  # logits after each prefix: none uniform, so that no derivative vanishes by symmetry
    [0.3, -0.4, -0.2],
    [1.1, 0.2, -0.7],
    [-0.5, 0.4, 0.9],
    [0.0, 0.8, -1.3],
    [-0.9, -0.1, 0.5],
    [0.6, -1.2, 0.1],
    [0.2, 0.7, -0.3],
]


class Tabular:
    """The tabular policy of reference.py with logits that require gradients, and its scores of responses."""

    def __init__(self, table: reference.Table) -> None:
        self.logits = torch.tensor(table, dtype=torch.float64, requires_grad=True)

    def scores(self, responses: list[tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logps, entropies, mask), (B, MAX_LENGTH). Padding is scored too, like a first token."""
        padding = [[0] * (reference.MAX_LENGTH - len(r)) for r in responses]
        rows = torch.tensor([[*reference.prefix_numbers(r), *p] for r, p in zip(responses, padding, strict=True)])
        tokens = torch.tensor([[*r, *p] for r, p in zip(responses, padding, strict=True)])
        mask = torch.tensor([[k < len(r) for k in range(reference.MAX_LENGTH)] for r in responses])
        logp = self.logits.log_softmax(dim=-1)[rows]
        return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(dim=-1), mask

    def gradient(
        self, responses: list[tuple[int, ...]], of_sequence: Tensor, logp_weights: Tensor, entropy_weights: Tensor
    ) -> Tensor:
        """Return the gradient of Σ_i of_sequence_i Σ_k (w_ik log π(t_ik) + u_ik h_ik) with respect to the logits."""
        logps, entropies, _ = self.scores(responses)
        surrogate = (of_sequence * (logp_weights * logps + entropy_weights * entropies).sum(dim=1)).sum()
        return torch.autograd.grad(surrogate, self.logits)[0]


def all_groups(table: reference.Table, group_size: int) -> tuple[list[tuple[int, ...]], Tensor, Tensor]:
    """Return every possible group of responses, one prompt each: (responses, prompt_index, probability / group_size).

    A sum over sequences weighted by the last is the expectation, over batches, of the mean over a batch.
    """
    responses, prompts, weights = [], [], []
    for number, group in enumerate(itertools.product(reference.RESPONSES, repeat=group_size)):
        responses += group
        prompts += [number] * group_size
        weights += [math.exp(sum(reference.sequence_logp(table, r) for r in group)) / group_size] * group_size
    return responses, torch.tensor(prompts), torch.tensor(weights, dtype=torch.float64)


def ragged(padded: Tensor, mask: Tensor) -> list[list[float]]:
    return [row[alive.bool()].tolist() for row, alive in zip(padded, mask, strict=True)]


def padded(rows: reference.Ragged, like: Tensor) -> Tensor:
    """Return ragged rows as a matrix shaped `like`, zero after each row's end."""
    out = torch.zeros(like.shape, dtype=torch.float64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return out


def twin_weights(
    entropies: Tensor, mask: Tensor, prompts: Tensor, target: str, baseline="others"
) -> tuple[Tensor, Tensor]:
    w, u = reference.surrogate_weights(ragged(entropies.detach(), mask), prompts.tolist(), target, baseline)
    return padded(w, entropies), padded(u, entropies)


def random_batch(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return (entropies, mask, prompt_index) of three prompts with 2, 3 and 4 ragged, interleaved responses.

    One response is longer than all others, so at its end it alone is alive.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.tensor([31, 4, 4, 900, 31, 4, 900, 900, 4])
    lengths = torch.randint(1, 6, prompts.shape, generator=generator)
    lengths[2] = 8
    mask = torch.arange(8) < lengths.unsqueeze(1)
    entropies = torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    return entropies.to(dtype).masked_fill(~mask, GARBAGE), mask, prompts


every_target = pytest.mark.parametrize("target", ["sequence", "token", "length"])


# --- the expectation, by enumeration ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sequence", "length"])
@pytest.mark.parametrize("group_size", [2, 3])
def test_the_mean_over_all_groups_is_the_exact_derivative_of_entropy_and_length(group_size: int, target: str) -> None:
    policy, exact = Tabular(TABLE), reference.exact(TABLE)
    responses, prompts, of_sequence = all_groups(TABLE, group_size)
    weights = surrogate_weights(*policy.scores(responses)[1:], prompts, target)
    expected = torch.tensor(exact.d_entropy if target == "sequence" else exact.d_length, dtype=torch.float64)
    torch.testing.assert_close(policy.gradient(responses, of_sequence, *weights), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("target", ["sequence", "length"])
def test_ratios_to_another_sampler_give_the_exact_derivative_in_the_mean_over_its_groups(target: str) -> None:
    """The ratios are not normalised. ∂H_tok is (∂H_seq − H_tok ∂E[T]) / E[T]."""
    sampler = [[1.3 * x + 0.4 * math.sin(3 * i + 5 * j) for j, x in enumerate(row)] for i, row in enumerate(TABLE)]
    policy = Tabular(TABLE)
    responses, prompts, of_sequence = all_groups(sampler, 2)
    logps, entropies, mask = policy.scores(responses)
    log_ratios = (logps - Tabular(sampler).scores(responses)[0]).detach()
    assert float(log_ratios[mask].abs().max()) > 0.5
    weights = surrogate_weights(entropies, mask, prompts, target, ratios=prefix_ratios(log_ratios, mask))
    exact = reference.exact(TABLE)
    expected = torch.tensor(exact.d_entropy if target == "sequence" else exact.d_length, dtype=torch.float64)
    torch.testing.assert_close(policy.gradient(responses, of_sequence, *weights), expected, rtol=0, atol=1e-9)


def test_the_token_target_over_the_whole_population_is_the_exact_derivative_per_token() -> None:
    """With probabilities in quarters, each response occurs 64·p times in a batch, which has no sampling error."""
    table = [[math.log(x) for x in row] for row in ([1, 1, 2], [1, 2, 1], [2, 1, 1], [1, 1, 2], [2, 1, 1]) * 2][:7]
    copies = [round(64 * math.exp(reference.sequence_logp(table, r))) for r in reference.RESPONSES]
    population = [r for r, count in zip(reference.RESPONSES, copies, strict=True) for _ in range(count)]
    assert len(population) == 64
    pairs = list(itertools.product(population, repeat=2))
    responses = [r for pair in pairs for r in pair]
    policy = Tabular(table)
    weights = surrogate_weights(*policy.scores(responses)[1:], torch.arange(len(pairs)).repeat_interleave(2), "token")
    of_sequence = torch.full((len(responses),), 1 / len(responses), dtype=torch.float64)
    exact = reference.exact(table)
    d_entropy, d_length = (torch.tensor(d, dtype=torch.float64) for d in (exact.d_entropy, exact.d_length))
    expected = (d_entropy - exact.entropy / exact.length * d_length) / exact.length
    torch.testing.assert_close(policy.gradient(responses, of_sequence, *weights), expected, rtol=0, atol=1e-9)


# --- weight by weight -------------------------------------------------------------------------------------------------


def test_weights_of_three_responses_equal_those_by_hand() -> None:
    """One prompt, responses A, B, C with entropies [.9 .6 .3 .1], [.5 .2], [.4]. R sums the entropies after a token.

        R_A = [1.0 .4 .1 0]        R_B = [.2 0]        R_C = [0]

    Token 1: the others' mean is (.2 + 0)/2 for A, (1 + 0)/2 for B, (1 + .2)/2 for C:  w = .9, −.3, −.6.
    Token 2: only A and B are alive:  w = .4 − 0, 0 − .4.      Tokens 3, 4: A is alone, baseline 0:  w = .1, 0.
    For the length R_A = [3 2 1 0], R_B = [1 0], R_C = [0]:  w_A = [2.5 2 1 0],  w_B = [−.5 −2],  w_C = [−2].
    """
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    entropies = torch.tensor([[0.9, 0.6, 0.3, 0.1], [0.5, 0.2, 9, 9], [0.4, 9, 9, 9]], dtype=torch.float64)
    prompts = torch.tensor([5, 5, 5])
    w, u = surrogate_weights(entropies, mask, prompts, "sequence")
    by_hand = torch.tensor([[0.9, 0.4, 0.1, 0], [-0.3, -0.4, 0, 0], [-0.6, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(w, by_hand, rtol=0, atol=1e-14)
    assert torch.equal(u, mask.double())
    w, u = surrogate_weights(entropies, mask, prompts, "length")
    assert torch.equal(w, torch.tensor([[2.5, 2, 1, 0], [-0.5, -2, 0, 0], [-2, 0, 0, 0]], dtype=torch.float64))
    assert not u.any()


@every_target
@pytest.mark.parametrize("seed", range(4))
def test_weights_equal_the_plain_twin_on_ragged_interleaved_batches(target: str, seed: int) -> None:
    """The twin needs no padding (garbage here), no mask (of any dtype here), and no order of rows."""
    entropies, mask, prompts = random_batch(seed)
    for dtype in (torch.bool, torch.int64, torch.float32):
        weights = surrogate_weights(entropies, mask.to(dtype), prompts, target)
        for got, expected in zip(weights, twin_weights(entropies, mask, prompts, target), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@every_target
def test_weights_of_prompts_on_two_processes_equal_those_of_all_prompts_on_one(target: str) -> None:
    (ours, mask, prompts), (theirs, other_mask, _) = random_batch(seed=1), random_batch(seed=2)
    masks, index = (mask, other_mask), torch.cat([prompts, prompts + int(prompts.max()) + 1])
    whole = surrogate_weights(torch.cat([ours, theirs]), torch.cat(masks), index, target)

    def weights(rank: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.stack(surrogate_weights((ours, theirs)[rank], masks[rank], prompts, target, reduce=reduce))

    torch.testing.assert_close(torch.cat(on_two_ranks(weights), dim=1), torch.stack(whole), rtol=0, atol=1e-12)


@every_target
def test_weights_with_normalised_ratios_equal_the_plain_twin_between_environment_tokens(target: str) -> None:
    entropies, mask, prompts = random_batch(seed=7)
    wide = [torch.stack([part, torch.full_like(part, fill)], dim=2).flatten(1) for part, fill in
            ((entropies, GARBAGE), (mask, 0))]  # an environment token follows each policy token  # fmt: skip
    log_ratios = torch.randn(mask.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logs = torch.stack([log_ratios, torch.full_like(log_ratios, GARBAGE)], dim=2).flatten(1)
    got = surrogate_weights(*wide, prompts, target, ratios=normalised_ratios(prefix_ratios(logs, wide[1])))
    prefixes = reference.prefix_ratios(ragged(log_ratios, mask))
    twin = reference.surrogate_weights(ragged(entropies, mask), prompts.tolist(), target, ratios=prefixes)
    for ours, rows in zip(got, twin, strict=True):
        torch.testing.assert_close(ours[:, ::2], padded(rows, entropies), rtol=1e-10, atol=1e-12)
        assert not ours[:, 1::2].any()


@every_target
def test_weights_of_fp32_entropies_equal_those_of_float64_up_to_rounding(target: str) -> None:
    batch = random_batch(seed=11, dtype=torch.float32)
    for got, expected in zip(surrogate_weights(*batch, target), twin_weights(*batch, target), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


@every_target
def test_weights_carry_no_graph(target: str) -> None:
    responses = [reference.RESPONSES[i] for i in (0, 5, 9, 14)]
    _, entropies, mask = Tabular(TABLE).scores(responses)
    assert entropies.requires_grad
    weights = surrogate_weights(entropies, mask, torch.tensor([0, 0, 1, 1]), target)
    assert not any(w.requires_grad for w in weights)


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([0, 0, 0], {"target": "nats"}, "'sequence'.*'token'.*'length'"),
        ([0, 0, 0], {"baseline": "batch"}, "'prompt'.*'buffer'"),
        *(([0, 0, 1], {"target": target}, "two responses") for target in ("sequence", "token", "length")),
    ],
)
def test_inputs_that_have_no_weights_are_refused_with_the_choices(
    prompts: list[int], options: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        surrogate_weights(torch.zeros(3, 2), torch.ones(3, 2), torch.tensor(prompts), **options)


# --- the baseline from the whole buffer -------------------------------------------------------------------------------


def two_prompts() -> tuple[Tensor, list[tuple[int, tuple[int, ...]]], list[float]]:
    """Return logits (2 prompts, prefixes, tokens), all (prompt, response) outcomes, and their probabilities."""
    other = [[0.7 * x - 0.3 * (i % 2) for i, x in enumerate(row)] for row in reversed(TABLE)]
    logits = torch.tensor([TABLE, other], dtype=torch.float64, requires_grad=True)
    outcomes = list(itertools.product((0, 1), reference.RESPONSES))
    tables = logits.tolist()
    return logits, outcomes, [0.5 * math.exp(reference.sequence_logp(tables[p], r)) for p, r in outcomes]


def test_the_buffer_baseline_is_unbiased_for_prompts_with_one_response() -> None:
    """Over all buffers of two draws, the mean is the derivative of the mean entropy over both prompts."""
    logits, outcomes, chances = two_prompts()
    policies = [Tabular(table) for table in logits.tolist()]
    scores = [policies[p].scores([r]) for p, r in outcomes]  # one row each, with a graph
    logps, entropies, mask = (torch.cat(parts) for parts in zip(*scores, strict=True))
    w_mean, u_mean = torch.zeros_like(logps), torch.zeros_like(logps)
    for pair in itertools.product(range(len(outcomes)), repeat=2):
        rows = torch.tensor(pair)
        known = (entropies[rows], mask[rows], rows)
        weights = surrogate_weights(*known, "sequence", baseline="buffer")
        for total, weight in zip((w_mean, u_mean), weights, strict=True):
            total.index_add_(0, rows, 0.5 * chances[pair[0]] * chances[pair[1]] * weight)
    surrogate = (w_mean * logps + u_mean * entropies)[mask].sum()
    for policy in policies:
        derivative = torch.autograd.grad(surrogate, policy.logits, retain_graph=True)[0]
        expected = 0.5 * torch.tensor(reference.exact(policy.logits.tolist()).d_entropy, dtype=torch.float64)
        torch.testing.assert_close(derivative, expected, rtol=0, atol=1e-9)


@every_target
def test_the_buffer_baseline_treats_all_responses_as_one_prompt(target: str) -> None:
    entropies, mask, prompts = random_batch(3)
    buffer = surrogate_weights(entropies, mask, prompts, target, baseline="buffer")
    twin = twin_weights(entropies, mask, torch.zeros_like(prompts), target)
    for got, expected in zip(buffer, twin, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_single_responses_are_accepted_with_the_buffer_baseline_alone() -> None:
    entropies, mask, prompts = random_batch(4)
    single = torch.arange(len(prompts))
    surrogate_weights(entropies, mask, single, baseline="buffer")
    with pytest.raises(ValueError, match="baseline='buffer'"):
        surrogate_weights(entropies, mask, single)

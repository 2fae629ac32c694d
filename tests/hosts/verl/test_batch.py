"""What is read from verl's batches and written back into them, with values worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl.workers")

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.utils.padding import no_padding_2_padding

from rl_training.hosts.verl import batch
from rl_training.hosts.verl.batch import ResponseTokens, read_rollout, response_entropies

# Two prompts of 2 and 1 tokens with responses of 3 and 2 tokens. A tool wrote the first response's second token.
PROMPTS, RESPONSES, MASKS = ([5, 6], [7]), ([8, 9, 2], [3, 4]), ([1, 0, 1], [1, 1])


def nested(rows: Any, dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def two_rows(advantages: Any = ([0.5, 0.0, 0.5], [-0.5, -0.5])) -> TensorDict:
    data = {
        "prompts": nested(PROMPTS),
        "responses": nested(RESPONSES),
        "response_mask": nested(MASKS),
        "input_ids": nested([p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]),
        "advantages": nested(advantages, torch.float),
        "rm_scores": nested(([0.0, 0.0, 1.0], [0.0, 0.25]), torch.float),
        "old_log_probs": nested(([-1.0, -2.0, -3.0], [-4.0, -5.0]), torch.float),
    }
    batch = TensorDict(data, batch_size=2)
    tensordict_utils.assign_non_tensor_stack(batch, "uid", ["b", "a"])
    return batch


def test_a_microbatch_is_read_with_left_padded_prompts_and_tool_tokens_masked() -> None:
    rollout = read_rollout(two_rows(), False, max_length=3, end_tokens=[2])
    assert rollout.prompt_ids.tolist() == [[5, 6], [0, 7]]
    assert rollout.prompt_mask.tolist() == [[1, 1], [0, 1]]
    assert rollout.completion_ids.tolist() == [[8, 9, 2], [3, 4, 0]]
    assert rollout.completion_mask.tolist() == [[1, 0, 1], [1, 1, 0]]
    assert rollout.environment_mask is not None
    assert rollout.environment_mask.tolist() == [[0, 1, 0], [0, 0, 0]]
    assert (rollout.advantages.tolist(), rollout.rewards.tolist()) == ([0.5, -0.5], [1.0, 0.25])
    assert rollout.sampling_logps.tolist() == [[-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0]]


@pytest.mark.parametrize(("max_length", "end_tokens", "truncated"), [(3, [2], [False, False]), (3, [1], [True, False]),
                                                                     (2, [1], [True, True])])  # fmt: skip
def test_a_response_of_maximum_length_without_an_end_token_is_truncated(
    max_length: int, end_tokens: list[int], truncated: list[bool]
) -> None:
    rollout = read_rollout(two_rows(), True, max_length, end_tokens)
    assert rollout.truncated.tolist() == truncated
    assert rollout.sampling_logps is None


def test_advantages_that_differ_within_a_response_are_kept_by_token() -> None:
    """The second token of the first response is a tool's, so it has no advantage of its own."""
    rollout = read_rollout(two_rows(([0.5, 9.0, 0.25], [-0.5, -0.5])), True, 3, [])
    assert rollout.advantages.tolist() == [0.375, -0.5]
    assert rollout.token_advantages is not None
    assert rollout.token_advantages.tolist() == [[0.5, 0.0, 0.25], [-0.5, -0.5, 0.0]]
    assert read_rollout(two_rows(), True, 3, []).token_advantages is None


def test_prompts_are_numbered_by_their_uid() -> None:
    """The two rows answer different prompts. Their numbers are the same in every process and at every step."""
    first, second = (read_rollout(two_rows(), True, 3, []).prompt_index.tolist() for _ in range(2))
    assert first == second
    assert len(set(first)) == 2


def test_log_probabilities_are_read_from_verls_layout_and_written_back() -> None:
    """The flat tensor is shifted by one: entries 1, 2, 3 of five for the first sequence, 0 and 1 for the second."""
    data = two_rows()
    flat = torch.arange(8.0, requires_grad=True)
    nested_logps = torch.nested.nested_tensor_from_jagged(flat, data["input_ids"].offsets())
    tokens = ResponseTokens(data)
    padded = tokens.padded(flat)
    assert padded.tolist() == [[1.0, 2.0, 3.0], [5.0, 6.0, 0.0]] == no_padding_2_padding(nested_logps, data).tolist()
    back = tokens.to_nested(padded, nested_logps)
    assert back.values().tolist() == flat.tolist()
    weights = torch.tensor([[1.0, 10.0, 100.0], [1000.0, 10000.0, 0.0]])
    seen = []
    padded.register_hook(seen.append)
    (weights * no_padding_2_padding(back, data)).sum().backward()
    assert seen[0].tolist() == weights.tolist()
    assert flat.grad.tolist() == [0.0, 1.0, 10.0, 100.0, 0.0, 1000.0, 10000.0, 0.0]


@pytest.mark.parametrize("packed", [False, True])
def test_entropies_are_of_the_tempered_distributions_before_response_tokens_alone(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With logits 0 and x at temperature 2, the odds are exp(x / 2). Logits elsewhere are nan. Chunks have two rows."""
    monkeypatch.setattr(batch, "CHUNK_LOGITS", 4)
    odds, elsewhere = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]), torch.full((3, 2), torch.nan)
    logits = torch.stack([torch.zeros(5), 2 * odds], dim=1)
    first = torch.cat([elsewhere[:1], logits[:3], elsewhere[:1]])  # 2 tokens of the prompt, 3 of the response
    second = torch.cat([logits[3:], elsewhere[:1]])  # 1 and 2
    padded = torch.stack([first, torch.cat([second, elsewhere[:2]])])
    given = torch.cat([first, second, elsewhere]).unsqueeze(0) if packed else padded
    p = odds.sigmoid()
    expected = -(p * p.log() + (1 - p) * (1 - p).log())
    entropies = response_entropies(given, ResponseTokens(two_rows()), temperature=2.0)
    torch.testing.assert_close(entropies, torch.stack([expected[:3], torch.cat([expected[3:], torch.zeros(1)])]))

"""Converts verl's microbatches, which are nested tensors, to the engine's sequences and scores, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rl_training.policy.linear_head import CHUNK_LOGITS, scores_of_logits
from rl_training.policy.rollout import Rollout, pad_and_concat, with_one_advantage_each


def read_rollout(data: TensorDict, on_policy: bool, max_length: int, end_tokens: Sequence[int]) -> Rollout:
    """Return the sequences of a microbatch.

    Args:
        data: verl's microbatch.
        on_policy: Whether the current policy sampled the sequences and no optimizer step has learned from them.
        max_length: A response with this many tokens is truncated, unless it ends with one of `end_tokens`.
        end_tokens: Token ids that end a response.
    """
    prompts, responses = data["prompts"].unbind(), data["responses"].unbind()
    token_mask = _padded([torch.ones_like(response) for response in responses])
    mask = _padded(data["response_mask"].unbind()).to(token_mask)
    completion_ids = _padded(responses)
    lengths = token_mask.sum(dim=1)
    last = completion_ids.gather(1, (lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    old_logps = None if on_policy else _padded(data["old_log_probs"].unbind())
    engine_logps = data.get("rollout_log_probs", None)  # with actor_rollout_ref.rollout.calculate_log_probs=True
    rollout = Rollout(
        prompt_ids=_padded(prompts, on_the_left=True),
        prompt_mask=_padded([torch.ones_like(prompt) for prompt in prompts], on_the_left=True),
        completion_ids=completion_ids,
        completion_mask=mask,
        advantages=_padded(data["advantages"].unbind()),
        rewards=torch.stack([row.sum() for row in data["rm_scores"].unbind()]),
        prompt_index=torch.tensor([_prompt_number(str(uid)) for uid in data["uid"]], device=mask.device),
        sampling_logps=old_logps if engine_logps is None else _padded(engine_logps.unbind()),
        on_policy=on_policy,
        old_logps=old_logps,
        environment_mask=token_mask - mask if bool((token_mask != mask).any()) else None,
        truncated=(lengths >= max_length) & ~torch.isin(last, last.new_tensor(list(end_tokens))),
    )
    return with_one_advantage_each(rollout)


def _prompt_number(uid: str) -> int:
    """Return a prompt's number, a hash of verl's random uid: unique over all ranks and rollouts."""
    return int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=6).digest(), "big")


def _padded(rows: Sequence[Tensor], on_the_left: bool = False) -> Tensor:
    return pad_and_concat([row.unsqueeze(0) for row in rows], on_the_left=on_the_left)


class ResponseTokens:
    """Finds the predictions of response tokens in verl's flat tensors, which hold prompts and responses.

    Args:
        data: verl's microbatch.
    """

    def __init__(self, data: TensorDict) -> None:
        lengths, offsets = data["responses"].offsets().diff(), data["input_ids"].offsets()
        columns = torch.arange(int(lengths.max()), device=lengths.device)
        self.mask = columns < lengths.unsqueeze(1)  # (B, T), 1 on tokens
        before = (offsets.diff() - lengths - 1).unsqueeze(1) + columns  # (B, T), the position before each token
        rows = torch.arange(len(lengths), device=lengths.device).unsqueeze(1).expand_as(before)
        self.rows, self.columns = rows[self.mask], before[self.mask]  # (n,) each: its sequence, its position therein
        self.index = offsets[self.rows] + self.columns  # (n,), that position in a flat tensor

    def padded(self, flat: Tensor) -> Tensor:
        """Return the responses' values as (B, T), 0 where a response has no token, with graph if `flat` has one."""
        return flat.new_zeros(self.mask.shape).masked_scatter(self.mask, flat[self.index])

    def to_nested(self, padded: Tensor, nested: Any) -> Tensor:
        """Return the nested tensor with the (B, T) values written back: same numbers, but computed from `padded`."""
        flat = nested.values().index_put((self.index,), padded[self.mask])
        return torch.nested.nested_tensor_from_jagged(flat, nested.offsets())


def response_entropies(logits: Tensor, tokens: ResponseTokens, temperature: float) -> Tensor:
    """Return the entropies at the response tokens, (B, T), in nats, 0 elsewhere, without graph. Computed in chunks.

    Args:
        logits: (B, W, V), right-padded; or (1, W, V), with the sequences concatenated and perhaps padding at the end.
        tokens: The response tokens of the microbatch.
        temperature: Divides the logits.
    """
    is_flat = len(logits) == 1
    rows, columns = (torch.zeros_like(tokens.rows), tokens.index) if is_flat else (tokens.rows, tokens.columns)
    size = max(1, CHUNK_LOGITS // logits.shape[-1])
    with torch.no_grad():
        parts = (
            logits[some_rows, some_columns].float() / temperature
            for some_rows, some_columns in zip(rows.split(size), columns.split(size), strict=True)
        )
        values = [scores_of_logits(part, part.new_zeros(len(part), dtype=torch.long))[1] for part in parts]
        entropies = torch.cat(values)
    return entropies.new_zeros(tokens.mask.shape).masked_scatter(tokens.mask, entropies)

"""Converts verl's microbatches of nested tensors to the engine's sequences and scores, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rl_training.engine.batch import Rollout, in_one_width
from rl_training.engine.scorer import CHUNK_LOGITS
from rl_training.mathematics.linear_head import scores_of_logits


def read_rollout(
    data: TensorDict, number_of: Callable[[str], int], on_policy: bool, longest: int, ends: Sequence[int]
) -> Rollout:
    """Returns the sequences of a microbatch.

    number_of  the number of a prompt, by verl's uid
    longest    tokens at which a response is truncated, if it does not end with one of `ends`

    ValueError where advantages differ within a response: probes use one number per response.
    """
    prompts, responses = data["prompts"].unbind(), data["responses"].unbind()
    mask, there = _in_columns(data["response_mask"].unbind()), _in_columns([torch.ones_like(r) for r in responses])
    mask = mask.to(there)
    completion_ids = _in_columns(responses)
    lengths = there.sum(dim=1)
    last = completion_ids.gather(1, (lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return Rollout(
        prompt_ids=_in_columns(prompts, on_the_left=True),
        prompt_mask=_in_columns([torch.ones_like(p) for p in prompts], on_the_left=True),
        completion_ids=completion_ids,
        completion_mask=mask,
        advantages=_of_sequence(_in_columns(data["advantages"].unbind()), mask),
        rewards=torch.stack([row.sum() for row in data["rm_scores"].unbind()]),
        prompt_index=torch.tensor([number_of(str(uid)) for uid in data["uid"]], device=mask.device),
        sampling_logps=None if on_policy else _in_columns(data["old_log_probs"].unbind()),
        on_policy=on_policy,
        environment_mask=there - mask if bool((there != mask).any()) else None,
        truncated=(lengths >= longest) & ~torch.isin(last, last.new_tensor(list(ends))),
    )


def _in_columns(rows: Sequence[Tensor], on_the_left: bool = False) -> Tensor:
    return in_one_width([row.unsqueeze(0) for row in rows], on_the_left=on_the_left)


def _of_sequence(advantages: Tensor, mask: Tensor) -> Tensor:
    """Returns (B,) of advantages (B, T), which verl repeats on all tokens of a response."""
    first = advantages.gather(1, mask.argmax(dim=1, keepdim=True))
    if bool(((advantages != first) & (mask != 0)).any()):
        raise ValueError(
            "advantages differ within a response, and probes measure one number for each: use "
            "algorithm.adv_estimator=grpo"
        )
    return first.squeeze(1) * (mask.sum(dim=1) > 0)


class Tokens:
    """Where the tokens of responses are predicted in verl's flat tensors, which hold prompts and responses."""

    def __init__(self, data: TensorDict) -> None:
        lengths, ends = data["responses"].offsets().diff(), data["input_ids"].offsets()[1:]
        columns = torch.arange(int(lengths.max()), device=lengths.device)
        self.there = columns < lengths.unsqueeze(1)  # (B, T), the rows and columns that they have here
        self.at = ((ends - lengths - 1).unsqueeze(1) + columns)[self.there]  # (n,), one less than each token's index

    def of_responses(self, flat: Tensor) -> Tensor:
        """Returns (B, T), 0 where a response has no token; with graph where the flat tensor has one."""
        return flat.new_zeros(self.there.shape).masked_scatter(self.there, flat[self.at])

    def put_back(self, of_responses: Tensor, nested: Any) -> Tensor:
        """Returns the nested tensor with these values put back: the same numbers, another path through the graph."""
        flat = nested.values().index_put((self.at,), of_responses[self.there])
        return torch.nested.nested_tensor_from_jagged(flat, nested.offsets())


def entropies_of(logits: Tensor, lengths: Sequence[int], temperature: float) -> Tensor:
    """Returns the entropies of all next-token distributions, flat, in nats, without graph, a few positions at a time.

    logits  (B, W, V), right-padded; or (1, W, V), the sequences one after another, perhaps with padding at their end
    """
    if len(logits) == 1:
        rows = [logits[0, : sum(lengths)]]
    else:
        rows = [row[:length] for row, length in zip(logits, lengths, strict=True)]
    positions = max(1, CHUNK_LOGITS // logits.shape[-1])
    parts = (part.float() / temperature for row in rows for part in row.split(positions))
    with torch.no_grad():
        return torch.cat([scores_of_logits(part, part.new_zeros(len(part), dtype=torch.long))[1] for part in parts])

"""Adds to TRL's batch of a fresh rollout what TRL leaves out: rewards, tool masks, and which rows are of one prompt.

Rows are matched with the generated responses by their tokens, because a subclass may have changed their order, dropped
some or added others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl import GRPOTrainer

from rl_training.hosts.trl.rollouts import batches
from rl_training.hosts.trl.rollouts.generated import GeneratedResponses, Response, key_of, rows_as_bytes, tool_mask
from rl_training.hosts.trl.rollouts.kind import BatchFacts
from rl_training.hosts.trl.rollouts.prompt_numbers import PROMPT, number_prompts
from rl_training.hosts.trl.versions import tokenizer_of
from rl_training.policy.rollout import pad_and_concat


class MatchedRows(NamedTuple):
    """The rows of a batch on this rank, and the generated responses that they are."""

    prompts: list[bytes]  # the tokens of each row's prompt
    keys: list[bytes]  # a hash of each row's prompt and completion
    responses: list[Response | None]  # None for a row that was never generated
    is_fresh: list[bool]  # whether the row was generated for this rollout
    has_placeholders: bool  # whether all log-probabilities of a sampler are 0


def match_rows(trainer: GRPOTrainer, generated: GeneratedResponses, output: Mapping[str, Any]) -> MatchedRows:
    """Return the rows of a batch with the generated responses that they are. The host waits for the device once."""
    ids = output["completion_ids"]
    tokens = batches.tokens_of(output, tokenizer_of(trainer).pad_token_id)
    placeholders = _are_placeholders(output).expand(len(ids), 1)
    prompt_ids, prompt_mask, host_ids, host_tokens, placeholders = _to_host(
        output["prompt_ids"], output["prompt_mask"], ids, tokens, placeholders
    )
    prompts = rows_as_bytes(prompt_ids, prompt_mask)
    keys = [key_of(*pair) for pair in zip(prompts, rows_as_bytes(host_ids, host_tokens), strict=True)]
    return MatchedRows(prompts, keys, *generated.find(keys), bool(placeholders.any()))


def _are_placeholders(output: Mapping[str, Any]) -> Tensor:
    """Return whether the batch has a sampler's log-probabilities and all of them are 0: (), on the device."""
    logps = output.get(batches.SAMPLING_LOGPS)
    tokens = output["completion_mask"]
    if logps is None:
        return tokens.new_zeros(())
    return (tokens.any() & ~(logps * tokens).any()).to(tokens)


def _to_host(*tables: Tensor) -> list[Tensor]:
    """Return tables of integers, (B, …) each, in host memory. The host waits for the device once."""
    joined = torch.cat([table.long() for table in tables], dim=1).cpu()
    return list(joined.split([table.shape[1] for table in tables], dim=1))


def complete_batch(trainer: GRPOTrainer, generated: GeneratedResponses, output: dict, rows: MatchedRows) -> BatchFacts:
    """Add to a batch what is known of its rows: tool masks, prompts and rewards. Return the facts of this rank.

    If a subclass returns a dictionary again, what an earlier rollout had added to it is removed.

    Args:
        trainer: The trainer.
        generated: What was generated for this rollout and earlier ones.
        output: TRL's batch dictionary, changed in place.
        rows: Its rows, matched with `generated`.
    """
    buffer_rewards = output.get(batches.BUFFER_REWARD)
    for key in batches.EXTRA_BATCH_KEYS:
        output.pop(key, None)
    if trainer.mask_truncated_completions:
        _add_tool_masks(output, rows.responses)
    group_size = _add_prompts(trainer, output, rows, is_in_order=generated.matches_latest_order(rows.keys))
    is_rewarded = _add_rewards(output, rows.responses, buffer_rewards)
    is_selected_by_subclass = bool(generated) and not generated.are_all(rows.keys)
    past = [response for response, fresh in zip(rows.responses, rows.is_fresh, strict=True) if not fresh]
    return BatchFacts(
        num_rows=len(rows.keys),
        num_foreign=len(past) if generated else 0,
        has_learned=any(response is not None and response.learned for response in past),
        is_unrewarded=not is_rewarded,
        is_untested=is_selected_by_subclass or buffer_rewards is not None,
        group_size=group_size,
    )


def _add_prompts(trainer: GRPOTrainer, output: dict, rows: MatchedRows, *, is_in_order: bool) -> int:
    """Add the number of each row's prompt. Return the number of responses per prompt, 0 if prompts differ in it.

    Args:
        is_in_order: Whether rows are in the order of generation.
    """
    has_images = any(output.get(name) is not None for name in batches.IMAGE_INPUTS)
    numbers, group_size = number_prompts(trainer, rows.prompts, rows.keys, is_in_order, has_images)
    output[PROMPT] = torch.tensor(numbers).to(output["completion_ids"].device, non_blocking=True)
    return group_size


def _add_rewards(output: dict, responses: Sequence[Response | None], buffer_rewards: Tensor | None) -> bool:
    """Add the rewards of all rows, if they are known. Return whether the batch has them.

    Args:
        output: TRL's batch dictionary, changed in place.
        responses: The generated response that each row is.
        buffer_rewards: The rewards, (B,), by which a FilteredBuffer has chosen the rows. None without a buffer.
    """
    device = output["completion_ids"].device
    if buffer_rewards is not None:
        output[batches.REWARD] = buffer_rewards
    else:
        rewards = [None if response is None else response.reward for response in responses]
        if not rewards or None in rewards:
            return False
        output[batches.REWARD] = torch.tensor(rewards, dtype=torch.float32).to(device, non_blocking=True)
    by_function = [() if response is None else response.by_function for response in responses]
    if all(len(values) > 1 for values in by_function):
        output[batches.REWARDS_BY_FUNCTION] = torch.tensor(by_function).to(device, non_blocking=True)
    return True


def _add_tool_masks(output: dict, responses: Sequence[Response | None]) -> None:
    """Add the tool masks from before TRL masked truncated responses."""
    tool_bits_by_row = [None if response is None else response.tool_bits for response in responses]
    if any(bits is not None for bits in tool_bits_by_row):
        ids = output["completion_ids"]
        width = ids.shape[1]
        all_of_policy = torch.ones(1, width, dtype=torch.long)
        rows = [tool_mask(bits) if bits else all_of_policy for bits in tool_bits_by_row]
        output[batches.POLICY_MASK] = pad_and_concat(rows, at_least=width)[:, :width].to(ids.device, non_blocking=True)

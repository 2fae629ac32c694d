"""Reads TRL's batch dictionaries as rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import split_pixel_values_by_grid

from rl_training.errors import UserError
from rl_training.hosts.trl.reward_functions import named_rewards
from rl_training.hosts.trl.rollouts.prompt_numbers import PROMPT, numbers_in_batch
from rl_training.hosts.trl.settings.spelling import WITHOUT_PROBES
from rl_training.hosts.trl.versions import IMAGE_POSITIONS, tokenizer_of
from rl_training.policy.rollout import Rollout, with_one_advantage_each

# Keys that this package adds to TRL's batch dictionaries: what differs by row. record.py has the rest.
REWARD = "rollout_reward"  # (B,), weighted sum over the reward functions
REWARDS_BY_FUNCTION = "rollout_rewards_by_function"  # (B, reward functions), if there are several
POLICY_MASK = "written_by_policy"  # TRL's tool mask, but with the tokens of truncated responses
ALL_OLD_LOGPS = "all_old_logps"  # like OLD_LOGPS, but including truncated responses that the loss masks
BUFFER_REWARD = "rollout_buffer_reward"  # (B,), those by which a FilteredBuffer has chosen; REWARD once it is complete
EXTRA_BATCH_KEYS = (PROMPT, REWARD, REWARDS_BY_FUNCTION, POLICY_MASK, ALL_OLD_LOGPS, BUFFER_REWARD)
# Model inputs of TRL's batches other than tokens. Which of them a batch has depends on the model's processor.
IMAGE_INPUTS = (
    "pixel_values",  # the images of all rows, or their tiles or patches
    "num_images",  # images of each row
    "image_grid_thw",  # (images, 3), how many patches an image has along time, height and width
    IMAGE_POSITIONS,  # positions of an image's patches
    "image_sizes",  # size of each image before it was divided
    "num_tiles",  # tiles of each row
    "spatial_shapes",  # patches of each tile along height and width
    "pixel_attention_mask",  # 1 on pixels or patches, 0 on padding
    "token_type_ids",  # (B, P + T), marks image tokens
    "mm_token_type_ids",  # the same by another name
)
UNTESTED = "rollout_untested"  # a subclass may add it, 1 if `Rollout.untested`
# TRL's own keys.
OLD_LOGPS = "old_per_token_logps"  # log-probabilities of the trainer's policy at sampling time
SAMPLING_LOGPS = "sampling_per_token_logps"  # log-probabilities of a separate sampling engine


def total_rewards(trainer: GRPOTrainer, by_function: Tensor) -> Tensor:
    """Return the weighted sums, (sequences,), of the reward functions' values, (sequences, functions).

    nan where all functions return None: TRL leaves such a response out of its group's mean.
    """
    totals = (by_function * trainer.reward_weights.to(by_function.device)).nansum(dim=1)
    return totals.masked_fill(by_function.isnan().all(dim=1), math.nan)


def rewards_of(trainer: GRPOTrainer, rows: list[dict[str, Any]], completion_ids: list[list[int]]) -> Tensor:
    """Return the rewards, (rows,), of one completion to each of these data set rows, identical on all ranks."""
    texts = tokenizer_of(trainer).batch_decode(completion_ids, skip_special_tokens=True)
    prompts = [row["prompt"] for row in rows]
    is_conversational = bool(prompts) and isinstance(prompts[0], list)
    completions = [[{"role": "assistant", "content": text}] for text in texts] if is_conversational else texts
    calculate = type(trainer)._calculate_rewards  # the class's method, without the instance's wrapper
    with named_rewards(trainer):
        by_function = calculate(trainer, rows, prompts, completions, completion_ids)
    return total_rewards(trainer, by_function[: len(rows)])


def image_inputs(inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a batch's model inputs other than tokens, split by row. None for text alone.

    Raises:
        UserError: Naming the input, if it cannot be split by rows.
    """
    present = {name: inputs[name] for name in IMAGE_INPUTS if inputs.get(name) is not None}
    if not present:
        return None
    by_row = split_pixel_values_by_grid(present)
    for name, values in by_row.items():
        if len(values) != len(inputs["completion_ids"]):
            raise UserError(
                f"{name} has {len(values)} entries for {len(inputs['completion_ids'])} sequences, and nothing says "
                f"which belong to which: probes cannot measure this model: {WITHOUT_PROBES}"
            )
    return by_row


def read_rollout(
    inputs: Mapping[str, Any],
    first_prompt: int,
    on_policy: bool,
    pad_token_id: int | None = None,
    end_tokens: Sequence[int] = (),
) -> Rollout:
    """Return the sequences of one of TRL's batch dictionaries.

    Args:
        inputs: TRL's batch dictionary.
        first_prompt: The number of its first prompt.
        on_policy: Whether the current policy sampled the sequences and no optimizer step has learned from them.
        pad_token_id: Give it if the loss may mask truncated responses (mask_truncated_completions), to read them too.
        end_tokens: End-of-response tokens and the padding token: a response that ends with none of them is truncated.
            If empty, truncation is unknown.
    """
    tokens = inputs["completion_mask"]
    advantages = inputs["advantages"]
    old_logps = inputs.get(OLD_LOGPS)
    written_by_policy = inputs.get(POLICY_MASK, inputs.get("tool_mask"))
    if pad_token_id is not None:
        hidden = are_hidden(inputs)
        tokens = tokens_of(inputs, pad_token_id)
        advantages = advantages.masked_fill(hidden.view(-1, *[1] * (advantages.ndim - 1)), 0.0)
        old_logps = inputs.get(ALL_OLD_LOGPS)  # TRL's own lack the masked responses
    policy = tokens if written_by_policy is None else tokens * written_by_policy
    rollout = Rollout(
        prompt_ids=inputs["prompt_ids"],
        prompt_mask=inputs["prompt_mask"],
        completion_ids=inputs["completion_ids"],
        completion_mask=policy,
        advantages=advantages,
        rewards=inputs.get(REWARD),
        prompt_index=first_prompt + numbers_in_batch(inputs),
        sampling_logps=inputs.get(SAMPLING_LOGPS, old_logps),
        on_policy=on_policy,
        old_logps=old_logps,
        environment_mask=None if written_by_policy is None else tokens - policy,
        images=image_inputs(inputs),
        truncated=_are_truncated(inputs["completion_ids"], tokens, end_tokens) if end_tokens else None,
        untested=UNTESTED in inputs and bool(inputs[UNTESTED].any()),
    )
    return with_one_advantage_each(rollout)


def rewards_by_name(trainer: GRPOTrainer, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the values of each reward function, (B,); empty if there is only one, or they are unknown.

    Functions of the same name are numbered.
    """
    if REWARDS_BY_FUNCTION not in inputs:
        return {}
    names = trainer.reward_func_names
    unique = [f"{name}_{i}" if names.count(name) > 1 else name for i, name in enumerate(names, start=1)]
    return dict(zip(unique, inputs[REWARDS_BY_FUNCTION].unbind(dim=1), strict=True))


def tokens_of(inputs: Mapping[str, Any], pad_token_id: int) -> Tensor:
    """Return a mask, (B, T), that is 1 on the tokens of all responses, including those that the loss masks."""
    all_tokens = _up_to_last_token(inputs["completion_ids"], pad_token_id)
    return torch.where(are_hidden(inputs).unsqueeze(1), all_tokens, inputs["completion_mask"])


def are_hidden(inputs: Mapping[str, Any]) -> Tensor:
    """Return which responses the loss masks entirely, (B,): with mask_truncated_completions, the truncated ones."""
    return inputs["completion_mask"].sum(dim=1) == 0


def _are_truncated(ids: Tensor, tokens: Tensor, end_tokens: Sequence[int]) -> Tensor:
    """Return which responses end with none of these tokens, (B,), as TRL defines truncation."""
    last = (tokens * torch.arange(1, ids.shape[1] + 1, device=ids.device)).argmax(dim=1, keepdim=True)
    last_ids = ids.gather(1, last).squeeze(1)
    return ~torch.stack([last_ids == token for token in end_tokens]).any(dim=0)  # no transfer to wait for


def _up_to_last_token(ids: Tensor, pad_token_id: int) -> Tensor:
    """Return a mask, (B, T), that is 1 up to each row's last non-padding token. Right for truncated responses only."""
    is_real = (ids != pad_token_id).long()
    return (is_real.flip(1).cumsum(dim=1).flip(1) > 0).to(is_real)

"""Fill a trainer's rollout with prompts that a FilteredBuffer draws, in as many generations as it allows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from rl_training.errors import UserError
from rl_training.hosts.trl.attempt_metrics import Metrics, log_attempts
from rl_training.hosts.trl.buffer import FilteredBuffer
from rl_training.hosts.trl.rollouts import batches
from rl_training.hosts.trl.settings.spelling import Spelling
from rl_training.hosts.trl.versions import generation_calls_code, tokenizer_of
from rl_training.policy.rollout import are_mixed, pad_and_concat

Generate = Callable[[list[dict[str, Any]]], tuple[dict[str, Any], Tensor]]  # rows → TRL's output, rewards of all ranks


def start_buffer(trainer: GRPOTrainer, buffer: FilteredBuffer, spelling: Spelling) -> None:
    """Start the buffer on the trainer's prompts. Raise UserError, with the fix, if it cannot filter them.

    Args:
        trainer: The trainer.
        buffer: The buffer.
        spelling: Names settings in advice.
    """
    if generation_calls_code(trainer):
        raise UserError(
            f"{spelling.buffer} is for text rollouts of one turn, without tools, environments or a rollout_func: "
            f"{spelling.no_buffer}"
        )
    if trainer.multi_objective_aggregation != "sum_then_normalize":
        raise UserError(
            f"multi_objective_aggregation={trainer.multi_objective_aggregation!r} makes a prompt's advantages depend "
            f"on the other prompts generated with it, rejected ones included: use 'sum_then_normalize', or "
            f"{spelling.no_buffer}"
        )
    if {"image", "images"} & set(trainer.train_dataset.column_names or ()):
        raise UserError(
            f"{spelling.buffer} joins rollouts of text, and these prompts have images: {spelling.no_buffer}"
        )
    if not isinstance(trainer.train_dataset, Sized):
        raise UserError(
            f"{spelling.buffer} draws prompts from the whole training set, which needs a length: load it without "
            f"streaming, or {spelling.no_buffer}"
        )
    buffer.start(len(trainer.train_dataset))


def fill_slots(mixed: Tensor, num_slots: int) -> tuple[Tensor, int]:
    """Assign a rank's groups to its slots.

    Each of the first groups has its own slot. A later mixed group takes the first slot whose group is not mixed.
    Surplus groups are dropped.

    Args:
        mixed: (groups,), whether each group generated so far is mixed.
        num_slots: Groups of the rollout on this rank.

    Returns:
        The group of each slot, (num_slots,), and the number of slots without a mixed group.
    """
    groups = torch.arange(num_slots)
    empty = (~mixed[:num_slots]).nonzero().flatten()
    later = mixed[num_slots:].nonzero().flatten()
    filled = min(len(empty), len(later))
    groups[empty[:filled]] = num_slots + later[:filled]
    return groups, len(empty) - filled


def fill_rollout(trainer: GRPOTrainer, buffer: FilteredBuffer, generate: Generate, num_rows: int) -> dict[str, Any]:
    """Return a rollout of `num_rows` sequences for this rank, with rewards, and with as many mixed prompts as possible.

    Slots that stay empty keep their prompt of the first attempt, whose advantages are 0. All ranks generate the same
    number of groups per attempt: as many as the rank with the most empty slots needs. Collective.

    Args:
        trainer: The trainer. Its metrics get one merged value per name for all attempts.
        buffer: Draws the prompts, and learns their rewards.
        generate: Returns TRL's output for some rows, and the rewards of all ranks.
        num_rows: Sequences of the rollout on this rank.
    """
    size = trainer.num_generations
    world = trainer.accelerator.num_processes
    rank = trainer.accelerator.process_index
    num_slots = num_rows // size
    mixed = torch.zeros(world, 0, dtype=torch.bool)  # (ranks, groups so far)
    empty = [num_slots] * world  # slots of each rank without a mixed group
    outputs: list[dict[str, Any]] = []
    metrics: list[Metrics] = []
    tried: list[int] = []
    buffer.forget()
    while (most_empty := max(empty)) and len(outputs) < buffer.max_attempts:
        if most_empty * world > buffer.num_prompts - len(tried):
            break  # too few untried prompts are left
        prompts = buffer.draw(most_empty * world, tried)
        output, rewards, logged = _attempt(trainer, generate, prompts[rank * most_empty : (rank + 1) * most_empty])
        rewards = rewards.view(world, most_empty, size)
        output[batches.BUFFER_REWARD] = rewards[rank].flatten().to(output["completion_ids"].device)
        buffer.learn(prompts, rewards.flatten(0, 1))
        mixed = torch.cat([mixed, are_mixed(rewards).cpu()], dim=1)
        empty = [fill_slots(mixed_of_rank, num_slots)[1] for mixed_of_rank in mixed]
        tried += prompts
        outputs.append(output)
        metrics.append(logged)
    buffer_metrics = {
        "buffer/attempts": float(len(outputs)),
        "buffer/acceptance": int(mixed.sum()) / len(tried),
        "buffer/filled": 1 - sum(empty) / (num_slots * world),
    }
    log_attempts(trainer, metrics, [len(output["completion_ids"]) * world for output in outputs], buffer_metrics)
    return _joined(trainer, outputs, fill_slots(mixed[rank], num_slots)[0])


def _attempt(
    trainer: GRPOTrainer, generate: Generate, prompts: Sequence[int]
) -> tuple[dict[str, Any], Tensor, Metrics]:
    """Generate a group for each of these prompts: return what `generate` returns, and what TRL has logged of it."""
    rows = [dict(trainer.train_dataset[prompt]) for prompt in prompts for _ in range(trainer.num_generations)]
    earlier = trainer._metrics["train"]
    logged: Metrics = defaultdict(list)
    trainer._metrics["train"] = logged
    try:
        output, rewards = generate(rows)
    finally:
        trainer._metrics["train"] = earlier
    return output, rewards, logged


def _joined(trainer: GRPOTrainer, outputs: Sequence[dict[str, Any]], groups: Tensor) -> dict[str, Any]:
    """Join the chosen groups, numbered consecutively over TRL's outputs, into one output."""
    size = trainer.num_generations
    rows = (groups.unsqueeze(1) * size + torch.arange(size)).flatten().to(outputs[0]["completion_ids"].device)
    joined = {}
    for key, first in outputs[0].items():
        if first.ndim == 0:  # num_items_in_batch, which is recomputed below
            continue
        parts = [output[key] for output in outputs]
        if first.ndim == 2:
            value = tokenizer_of(trainer).pad_token_id if key.endswith("_ids") else 0
            joined[key] = pad_and_concat(parts, on_the_left=key.startswith("prompt"), value=value)[rows]
        else:
            joined[key] = torch.cat(parts)[rows]
    joined["num_items_in_batch"] = trainer.accelerator.gather(joined["completion_mask"].sum()).sum()
    return joined

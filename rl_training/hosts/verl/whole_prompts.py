"""Whole prompts: all responses to a prompt on one process, in one microbatch or several in a row.

verl balances the lengths on ranks by moving single responses, which scatters those to one prompt. Here whole prompts
are moved. This only changes the order of summation, and makes leave-one-prompt-out estimates possible.
"""

from __future__ import annotations

import torch
from omegaconf import DictConfig
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def whole_prompts_order(keys: list[str], lengths: list[int], ranks: int) -> list[int] | None:
    """Return an order of rows that keeps each prompt on one rank and balances lengths. None if there is none.

    Args:
        keys: verl's name of each row, UID_SESSION_INDEX.
        lengths: Tokens of each row.
        ranks: Number of ranks.
    """
    rows_by_prompt: dict[str, list[int]] = {}
    for row in sorted(range(len(keys)), key=keys.__getitem__):
        rows_by_prompt.setdefault(keys[row].rsplit("_", 2)[0], []).append(row)
    prompts = list(rows_by_prompt.values())
    if len(prompts) % ranks or len({len(rows) for rows in prompts}) > 1:
        return None
    work = calculate_workload(torch.tensor(lengths))
    work_by_prompt = [float(work[rows].sum()) for rows in prompts]
    parts = get_seqlen_balanced_partitions(work_by_prompt, k_partitions=ranks, equal_size=True)
    return [row for part in parts for prompt in part for row in prompts[prompt]]


def num_processes(config: DictConfig) -> int:
    """Return the number of training processes. Each has a share of every batch."""
    return config.trainer.n_gpus_per_node * config.trainer.nnodes


def whole_prompts_fix(config: DictConfig) -> str:
    """Return the fix for a setting that separates the responses to a prompt. Empty if they stay together."""
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    processes = num_processes(config)
    if actor.shuffle:
        return f"set {ACTOR}.shuffle=False"
    if actor.ppo_mini_batch_size % processes:
        return f"set {ACTOR}.ppo_mini_batch_size to a multiple of {processes}, the number of processes"
    tokens = n * (config.data.max_prompt_length + config.data.max_response_length)
    if actor.use_dynamic_bsz and tokens > actor.ppo_max_token_len_per_gpu:
        return f"set {ACTOR}.ppo_max_token_len_per_gpu={tokens} or more"
    size = actor.ppo_micro_batch_size_per_gpu or 1
    if not actor.use_dynamic_bsz and size % n and n % size:
        return f"set {ACTOR}.ppo_micro_batch_size_per_gpu to a multiple or a divisor of {ROLLOUT}.n={n}"
    return ""

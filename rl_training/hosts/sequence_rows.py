"""The sequences that a step has trained on, as rows of rollouts.jsonl.gz."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.step_result import StepResult


def sequence_rows(result: StepResult, decode: Callable[[Tensor], str]) -> Iterator[dict[str, Any]]:
    """Yield a row of the records for each sequence of a step on this rank.

    `length` counts sampled tokens. `logp` is Σ_t log π(t), in nats, at the parameters that the step starts from.
    `importance_ratio` is π(sequence) / π_sampled(sequence): 1 if it was sampled at these parameters, nan if the
    log-probabilities of the older parameters were not kept.
    """
    for rollout, scores in zip(result.rollouts, result.scores, strict=True):
        mask = rollout.completion_mask.bool()
        logps = scores.logps.double().masked_fill(~mask, 0.0).sum(dim=1)
        ratios = torch.full_like(logps, 1.0 if rollout.on_policy else math.nan)
        if rollout.sampling_logps is not None:
            sampled = rollout.sampling_logps.double().masked_fill(~mask, 0.0).sum(dim=1)
            ratios = (logps - sampled).exp()
        rewards = torch.full_like(logps, math.nan) if rollout.rewards is None else rollout.rewards
        prompts = zip(rollout.prompt_ids.cpu(), rollout.prompt_mask.cpu().bool(), strict=True)
        responses = zip(rollout.completion_ids.cpu(), rollout.token_mask.cpu().bool(), strict=True)
        columns = {  # each is copied from the device in one transfer
            "prompt": [decode(ids[mask]) for ids, mask in prompts],
            "response": [decode(ids[mask]) for ids, mask in responses],
            "prompt_index": rollout.prompt_index.tolist(),
            "reward": rewards.tolist(),
            "advantage": rollout.advantages.tolist(),
            "length": mask.sum(dim=1).tolist(),
            "logp": logps.tolist(),
            "importance_ratio": ratios.tolist(),
        }
        yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))

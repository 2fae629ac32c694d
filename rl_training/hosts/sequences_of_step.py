"""The sequences that a step was trained on, as text: rows for rollouts.jsonl.gz."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.batch import Rollout
from rl_training.mathematics.scores import Scores


def sequences_of_step(
    rollouts: Sequence[Rollout], scores: Sequence[Scores], decode: Callable[[Tensor], str]
) -> Iterator[dict[str, Any]]:
    """Yields a row per sequence of this rank: texts, reward, advantage, length in tokens, log-probability and ratio.

    logp              Σ_t log π(t), in nats, at the parameters that the step starts from
    importance_ratio  π(sequence) / π_sampled(sequence); 1 where it was sampled at these parameters, nan where TRL
                      has not kept the log-probabilities of older parameters
    """
    for rollout, said in zip(rollouts, scores, strict=True):
        mask = rollout.completion_mask.bool()
        logps = said.logps.double().masked_fill(~mask, 0.0).sum(dim=1)
        ratios = torch.full_like(logps, 1.0 if rollout.on_policy else math.nan)
        if rollout.sampling_logps is not None:
            sampled = rollout.sampling_logps.double().masked_fill(~mask, 0.0).sum(dim=1)
            ratios = (logps - sampled).exp()
        rewards = torch.full_like(logps, math.nan) if rollout.rewards is None else rollout.rewards
        columns = {  # each read from the device at once
            "prompt_index": rollout.prompt_index.tolist(),
            "reward": rewards.tolist(),
            "advantage": rollout.advantages.tolist(),
            "length": mask.sum(dim=1).tolist(),
            "logp": logps.tolist(),
            "importance_ratio": ratios.tolist(),
        }
        prompts = zip(rollout.prompt_ids.cpu(), rollout.prompt_mask.cpu().bool(), strict=True)
        responses = zip(rollout.completion_ids.cpu(), rollout.token_mask.cpu().bool(), strict=True)
        for row, (asked, given) in enumerate(zip(prompts, responses, strict=True)):
            texts = {"prompt": decode(asked[0][asked[1]]), "response": decode(given[0][given[1]])}
            yield texts | {name: values[row] for name, values in columns.items()}

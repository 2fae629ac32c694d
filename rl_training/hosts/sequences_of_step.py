"""The sequences that a step has learned from, in words: rows for rollouts.jsonl.gz."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from rl_training.engine.batch import Rollout
from rl_training.mathematics.scores import Scores


def sequences_of_step(
    rollouts: Sequence[Rollout], scores: Sequence[Scores], decode: Callable[[Tensor], str]
) -> Iterator[dict[str, Any]]:
    """Yields a row per sequence of this rank: texts, reward, advantage, length in tokens, log-probability and ratio.

    logp              Σ_t log π(t), in nats, at the parameters that the step starts from
    importance_ratio  π(sequence) / π_sampled(sequence); 1 where it was sampled at these very parameters, nan where TRL
                      has not kept the log-probabilities of older ones
    """
    for rollout, said in zip(rollouts, scores, strict=True):
        mask = rollout.completion_mask.bool()
        logps = said.logps.double().masked_fill(~mask, 0.0).sum(dim=1)
        ratios = None
        if rollout.sampling_logps is not None:
            sampled = rollout.sampling_logps.double().masked_fill(~mask, 0.0).sum(dim=1)
            ratios = (logps - sampled).exp()
        for row in range(rollout.num_sequences):
            yield {
                "prompt": decode(rollout.prompt_ids[row][rollout.prompt_mask[row].bool()]),
                "response": decode(rollout.completion_ids[row][rollout.token_mask[row].bool()]),
                "prompt_index": int(rollout.prompt_index[row]),
                "reward": float(rollout.rewards[row]) if rollout.rewards is not None else math.nan,
                "advantage": float(rollout.advantages[row]),
                "length": int(mask[row].sum()),
                "logp": float(logps[row]),
                "importance_ratio": float(ratios[row]) if ratios is not None else _unkept_ratio(rollout.on_policy),
            }


def _unkept_ratio(on_policy: bool) -> float:
    return 1.0 if on_policy else math.nan

"""Sequences that were sampled from a policy, as rows that a probe can pick from.

Shape legend, used in every comment of this package:
    B  sequences (of a microbatch, of the whole step on this rank, or of an evaluation buffer)
    P  prompt tokens, left-padded
    T  completion tokens, right-padded; the end-of-sequence token counts, padding never
    G  responses per prompt
    K  microbatches of an optimizer step on this rank
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rollout:
    """Sequences sampled from the policy, with what the policy said of them. Everything is detached."""

    prompt_ids: Tensor  # (B, P)
    prompt_mask: Tensor  # (B, P), 1 on tokens
    completion_ids: Tensor  # (B, T)
    completion_mask: Tensor  # (B, T), 1 on sampled tokens
    advantages: Tensor  # (B,)
    rewards: Tensor | None  # (B,), weighted sum over the reward functions; None for sequences that were not rewarded
    prompt_index: Tensor  # (B,), equal for responses of the same prompt, different for different prompts
    sampling_logps: Tensor | None  # (B, T) when it was sampled; None where TRL does not keep them
    on_policy: bool  # sampled at the very parameters that this optimizer step starts from

    @property
    def num_sequences(self) -> int:
        return self.completion_ids.shape[0]

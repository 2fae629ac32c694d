"""Rollouts for tests of every host of the engine: all get the same sequences and advantages."""

from __future__ import annotations

import torch

STEPS, PROMPTS, G, MICROBATCH, L_MAX = 3, 16, 4, 8, 24
ZERO_STEP = 2  # the step at which the second half of the sequences has no advantage


def of_another_sampler(logps: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities that differ from the policy's by up to 0.1, depending on the token."""
    return logps + 0.1 * torch.sin(ids.to(logps))


def given_rollout(step: int, num_prompts: int = PROMPTS) -> dict[str, torch.Tensor]:
    """Return the sequences of one step: the first half up to L_MAX tokens long, the second half up to 9."""
    generator = torch.Generator().manual_seed(step)
    n = num_prompts * G
    lengths = torch.cat([torch.randint(4, L_MAX + 1, (n // 2,), generator=generator),
                         torch.randint(1, 10, (n // 2,), generator=generator)])  # fmt: skip
    prompt_lengths = torch.randint(3, 9, (num_prompts,), generator=generator).repeat_interleave(G)
    prompts = torch.randint(4, 50, (num_prompts, 8), generator=generator).repeat_interleave(G, dim=0)
    advantages = torch.randn(num_prompts, G, generator=generator)
    advantages -= advantages.mean(dim=1, keepdim=True)
    if step == ZERO_STEP:
        advantages[num_prompts // 2 :] = 0.0
    mask = (torch.arange(L_MAX) < lengths.unsqueeze(1)).long()
    prompt_mask = (torch.arange(8) >= 8 - prompt_lengths.unsqueeze(1)).long()
    return {
        "prompt_ids": prompts * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(4, 50, (n, L_MAX), generator=generator) * mask,
        "completion_mask": mask,
        "advantages": advantages.flatten(),
        "num_items_in_batch": mask.sum(),
    }


def rewards_of(rollout: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return rewards with these advantages, whose mean is not the same for every prompt."""
    prompts = torch.arange(len(rollout["advantages"])) // G
    return rollout["advantages"] + (prompts % 3).to(rollout["advantages"])

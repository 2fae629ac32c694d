"""How many sequences a process has in an optimizer step and in a rollout, and how many steps a rollout lasts."""

from __future__ import annotations

import math

from trl import GRPOConfig


def sequences_per_step(args: GRPOConfig) -> int:
    """Return the number of sequences that each process has in an optimizer step."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps


def sequences_per_rollout(args: GRPOConfig) -> int:
    """Return the number of sequences that each process has in a rollout."""
    return args.per_device_train_batch_size * args.steps_per_generation


def steps_per_rollout(args: GRPOConfig) -> int:
    """Return the number of optimizer steps after which a rollout is used up.

    Until then TRL holds sampled sequences that its checkpoints do not save, so training cannot be resumed exactly.
    """
    microbatches = args.steps_per_generation * args.num_iterations
    return math.lcm(microbatches, args.gradient_accumulation_steps) // args.gradient_accumulation_steps

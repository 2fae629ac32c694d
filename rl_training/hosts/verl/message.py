"""What the trainer sends to the workers with each rollout, in verl's batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from rl_training.hosts.verl.training_settings import TrainingSettings

BATCH_KEY = "rl_training"  # key of the message in a batch; verl reads no such key


class RolloutFacts(TypedDict):
    """What the workers cannot see of a rollout."""

    number: int  # the trainer's step
    is_fresh: bool  # the present weights have sampled all of it


class Message(TypedDict):
    """What comes with a rollout."""

    training: TrainingSettings  # the same with each rollout; the workers read it at their first step
    rollout: RolloutFacts


def rollout_facts(tags: Sequence[dict[str, Any]], step: int) -> RolloutFacts:
    """Return what the workers cannot see of a rollout.

    Args:
        tags: verl's tags of each row.
        step: The trainer's step, which is the rollout's number. The weights before it have the number below.
    """
    versions = {tag.get(name) for tag in tags for name in ("min_global_steps", "max_global_steps")}
    return RolloutFacts(number=step, is_fresh=versions == {step - 1})

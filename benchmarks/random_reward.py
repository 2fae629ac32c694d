"""The task three_words with a reward independent of the response's content: a control for real.py."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from rl_training.tasks.task import Task
from rl_training.tasks.three_words import three_words

PAID = 0.25  # share of responses that earn 1


def three_words_for_nothing() -> Task:
    """Return the task with a reward of 1 for a quarter of all responses, chosen by a checksum of their text."""
    return replace(three_words(), reward=reward)


def reward(completions: list[Any], **columns: Any) -> list[float]:
    digests = [hashlib.sha256(repr(completion).encode()).digest() for completion in completions]
    return [float(digest[0] < PAID * 256) for digest in digests]

"""Which of the responses that a trainer has generated each row of a batch is: rows are found again by their tokens.

A subclass may reorder a rollout, leave rows out, draw again, or put in others from before (a replay buffer) or from
elsewhere (demonstrations). What TRL says of the rollout by position, rewards first of all, is then of other rows.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from rl_training.statistics.limit import Limit

REMEMBERED = 2**16  # responses of earlier rollouts


@dataclass
class Response:
    """One that was generated."""

    reward: float | None = None  # nan where no reward function says anything; None where it is not known
    tool_mask: list[int] | None = None  # (T,), 1 on the policy's own tokens; None where all are
    learned: bool = False  # it was in a batch
    mismatch: Limit | None = None  # it is no sample of the policy that is scored


def key_of(prompt: bytes, completion: bytes) -> bytes:
    """Return what stands for the tokens of a response and its prompt, each as 64-bit integers."""
    return hashlib.blake2b(len(prompt).to_bytes(8, "big") + prompt + completion, digest_size=16).digest()


def rows_as_bytes(ids: Tensor, mask: Tensor) -> list[bytes]:
    """Return the masked tokens of each row as 64-bit integers."""
    there = mask.bool()
    rows = ids[there].long().cpu().split(there.sum(dim=1).tolist())
    return [row.numpy().tobytes() for row in rows]


class GeneratedResponses:
    """The responses of the rollout that is being made, and those of earlier ones, the latest REMEMBERED of them."""

    def __init__(self) -> None:
        self._order: list[bytes] = []  # of the latest generation
        self._latest: list[Response] = []
        self._fresh: dict[bytes, Response] = {}  # of all generations of this rollout
        self._past: dict[bytes, Response] = {}

    def __bool__(self) -> bool:
        """Whether anything was generated for this rollout."""
        return bool(self._fresh)

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        tool_masks: Sequence[list[int]] | None,
        mismatch: Limit | None = None,
    ) -> None:
        """Take the tokens of what was just generated, row by row, and why all of it is no sample of the policy."""
        self._order = [
            key_of(array("q", prompt).tobytes(), array("q", completion).tobytes())
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        masks: Sequence[list[int] | None] = tool_masks or [None] * len(self._order)
        self._latest = [Response(tool_mask=mask, mismatch=mismatch) for mask in masks]
        for key, response in zip(self._order, self._latest, strict=True):
            self._fresh.setdefault(key, response)

    def reward(self, rewards: Sequence[float]) -> None:
        """Take the rewards of the latest generation, row by row; of another number of rows they are not known.

        Rows of the same tokens may have unlike rewards (answers differ): found by their tokens, they have none.
        """
        if len(rewards) != len(self._latest):
            return
        for key, response, reward in zip(self._order, self._latest, rewards, strict=True):
            response.reward = reward
            first = self._fresh[key]
            if first is not response and not _same(first.reward, reward):
                self._fresh[key] = Response(tool_mask=response.tool_mask, mismatch=response.mismatch)

    def lie_as(self, keys: Sequence[bytes]) -> bool:
        """Return whether these are the rows of the latest generation, in its order."""
        return [*keys] == self._order

    def find(self, keys: Sequence[bytes]) -> tuple[list[Response | None], list[bool]]:
        """Return each row's response, None where it was never generated, and whether it was for this rollout."""
        if self.lie_as(keys):
            return [*self._latest], [True] * len(keys)
        return [self._fresh.get(key) or self._past.get(key) for key in keys], [key in self._fresh for key in keys]

    def begin_next(self, learned: Iterable[bytes]) -> None:
        """Close the rollout: these are in its batch."""
        for key, response in self._fresh.items():
            response.learned = key in self._past and self._past[key].learned
        self._past |= self._fresh
        for key in learned:
            if key in self._past:
                self._past[key].learned = True
        for key in [*self._past][: max(0, len(self._past) - REMEMBERED)]:
            del self._past[key]
        self._fresh, self._order, self._latest = {}, [], []


def _same(first: float | None, other: float | None) -> bool:
    return first == other or (first is not None and other is not None and math.isnan(first) and math.isnan(other))

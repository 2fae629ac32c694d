"""Matches the rows of a batch with the generated responses, by their tokens.

A subclass may reorder a rollout, drop rows, generate again, or insert older responses (a replay buffer) or foreign ones
(demonstrations). What TRL knows by position, rewards above all, would then be assigned to the wrong rows.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl_training.statistics.unavailable import Unavailable

MAX_PAST_RESPONSES = 2**16  # number of responses of earlier rollouts that are kept


@dataclass(slots=True)
class Response:
    """A generated response. Many are kept, so it is small."""

    reward: float | None = None  # nan if no reward function returned a number; None if unknown
    by_function: tuple[float, ...] = ()  # of each reward function, nan if it returned none; empty if unknown
    # (⌈T / 8⌉,), a bit for each token: 1 if the policy wrote it, and 0 after the last. None if it wrote all of them.
    tool_bits: bytes | None = None
    learned: bool = False  # whether it was in the batch of an earlier rollout
    mismatch: Unavailable | None = None  # why it is not a sample of the scored policy


def tool_bits(mask: Sequence[int]) -> bytes:
    """Return a tool mask, (T,), as `Response.tool_bits`."""
    return np.packbits(np.array(mask, dtype=bool)).tobytes()


def tool_mask(bits: bytes) -> Tensor:
    """Return the tool mask, (1, 8 ⌈T / 8⌉), of `Response.tool_bits`. It is 0 after the response."""
    return torch.from_numpy(np.unpackbits(np.frombuffer(bits, dtype=np.uint8))).long().unsqueeze(0)


def key_of(prompt: bytes, completion: bytes) -> bytes:
    """Return a hash of a prompt and its completion, whose tokens are given as 64-bit integers."""
    return hashlib.blake2b(len(prompt).to_bytes(8, "big") + prompt + completion, digest_size=16).digest()


def rows_as_bytes(ids: Tensor, mask: Tensor) -> list[bytes]:
    """Return the tokens of each row where the mask is 1, as the bytes of 64-bit integers."""
    is_token = mask.bool()
    rows = ids[is_token].long().cpu().split(is_token.sum(dim=1).tolist())
    return [row.numpy().tobytes() for row in rows]


class GeneratedResponses:
    """The responses of the rollout in progress, and the latest MAX_PAST_RESPONSES responses of earlier rollouts."""

    def __init__(self) -> None:
        self._order: list[bytes] = []  # keys of the latest generation, in its order
        self._latest: list[Response] = []  # responses of the latest generation, in the same order
        self._fresh: dict[bytes, Response] = {}  # responses of all generations of this rollout
        self._num_drawn = Counter[bytes]()  # how often each was generated
        self._past: dict[bytes, Response] = {}  # responses of earlier rollouts, the latest last

    def __bool__(self) -> bool:
        """Whether anything was generated for this rollout."""
        return bool(self._fresh)

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        tool_masks: Sequence[Sequence[int]] | None,
        mismatch: Unavailable | None = None,
    ) -> None:
        """Add the responses that were just generated.

        Args:
            prompts: Token ids of each row's prompt.
            completions: Token ids of each row's completion.
            tool_masks: 1 on tokens that the policy wrote, for each row. None if it wrote all of them.
            mismatch: Why these responses are not samples of the policy. None if they are.
        """
        self._order = [
            key_of(array("q", prompt).tobytes(), array("q", completion).tobytes())
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        masks: Sequence[Sequence[int] | None] = tool_masks or [None] * len(self._order)
        self._latest = [
            Response(tool_bits=None if mask is None else tool_bits(mask), mismatch=mismatch) for mask in masks
        ]
        for key, response in zip(self._order, self._latest, strict=True):
            self._fresh.setdefault(key, response)
        self._num_drawn.update(self._order)

    def reward(self, rewards: Sequence[float], by_function: Sequence[Sequence[float]] | None = None) -> None:
        """Add the rewards of the latest generation, row by row. Ignored if their number differs from the responses'.

        Rows with the same tokens may have different rewards, because their reference answers differ. Looked up by
        tokens, such rows have no reward.
        """
        if len(rewards) != len(self._latest):
            return
        values_of_rows = by_function or [()] * len(rewards)
        for key, response, reward, values in zip(self._order, self._latest, rewards, values_of_rows, strict=True):
            response.reward = reward
            response.by_function = tuple(values)
            first = self._fresh[key]
            if first is not response and not _are_equal(first.reward, reward):
                self._fresh[key] = Response(tool_bits=response.tool_bits, mismatch=response.mismatch)

    def matches_latest_order(self, keys: Sequence[bytes]) -> bool:
        """Return whether these are exactly the rows of the latest generation, in the same order."""
        return [*keys] == self._order

    def are_all(self, keys: Sequence[bytes]) -> bool:
        """Return whether these are all responses that were generated for this rollout, each as often, in any order."""
        return Counter(keys) == self._num_drawn

    def find(self, keys: Sequence[bytes]) -> tuple[list[Response | None], list[bool]]:
        """Return each row's response, None if it was never generated, and whether it was generated for this rollout."""
        if self.matches_latest_order(keys):
            return [*self._latest], [True] * len(keys)
        return [self._fresh.get(key) or self._past.get(key) for key in keys], [key in self._fresh for key in keys]

    def begin_next(self, learned: Iterable[bytes]) -> None:
        """Close the rollout, whose batch contains these responses."""
        for key, response in self._fresh.items():
            earlier = self._past.pop(key, None)  # which is generated again, so that its place is among the latest
            response.learned = earlier is not None and earlier.learned
        self._past |= self._fresh
        for key in learned:
            if key in self._past:
                self._past[key].learned = True
        for key in [*self._past][: max(0, len(self._past) - MAX_PAST_RESPONSES)]:
            del self._past[key]
        self._fresh = {}
        self._order = []
        self._latest = []
        self._num_drawn.clear()


def _are_equal(a: float | None, b: float | None) -> bool:
    """Return whether two rewards are equal, with nan equal to nan."""
    return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))

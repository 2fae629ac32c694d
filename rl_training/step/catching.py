"""Catch the gradients of one backward as they arrive and hand them on bucket by bucket, in one of three ways.

    SentGradients          hooks on the leaves; each bucket is sent once it is complete
    AccumulatedGradients   the loop's backward reduces gradients itself (FSDP2): what it has added to `.grad`
    ReducedGradients       a probe's backward reduces them itself: takes each `.grad` at once, so few exist at a time

Each starts with `begin`. After a successful backward comes `finish`, which is a collective. After a failed one, perhaps
on this rank only, comes `drop`, which is not.
"""

from __future__ import annotations

import functools
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from rl_training.parallel.fold_vectors import Receiver
from rl_training.parallel.sharding import Shard
from rl_training.parallel.vectors import constant
from rl_training.step.exchange import Exchange

ENDS_TRAINING = "measuring has failed within this process's backward, and the others cannot be told, so training ends"
Timed = Callable[[], AbstractContextManager[None]]  # returns a context that adds up the time spent in it


class PendingGradients:
    """Gradients that have arrived but are not handed to receivers yet, by bucket of the layout."""

    def __init__(self, shard: Shard) -> None:
        self._layout = shard.layout
        self.buckets = shard.layout.buckets
        self.bucket_of = {name: index for index, bucket in enumerate(self.buckets) for name in bucket.names}
        self._gradients: dict[str, Tensor] = {}

    def replace(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Hold exactly these gradients."""
        self._gradients = {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def add(self, name: str, gradient: Tensor) -> None:
        """Hold a parameter's gradient, added to what is already held for it."""
        self._gradients[name] = self._gradients[name] + gradient if name in self._gradients else gradient

    def is_complete(self, index: int) -> bool:
        """Return whether all gradients of a bucket are held."""
        return all(name in self._gradients for name in self.buckets[index].names)

    def has_any(self, index: int) -> bool:
        """Return whether any gradient of a bucket is held."""
        return any(name in self._gradients for name in self.buckets[index].names)

    def take(self, names: Sequence[str], sizes: Iterable[int]) -> list[Tensor]:
        """Return the held gradients of these parameters, flat, and release them.

        A parameter without a gradient gets zeros that take no memory.

        Args:
            names: Parameter names.
            sizes: Number of entries of each parameter.
        """
        zero = constant(0.0, self._layout.dtype, self._layout.device)
        return [
            self._gradients.pop(name).reshape(-1).to(self._layout.device)
            if name in self._gradients
            else zero.expand(size)
            for name, size in zip(names, sizes, strict=True)
        ]


class CaughtBackward(ABC):
    """A backward whose gradients are being caught, from `begin` on.

    Args:
        shard: The trained parameters.
        pending: Holds gradients until they are handed on.
        receiver: Takes them.
        timed: Returns a context that adds up the time spent in hooks.
    """

    error: Exception | None = None  # raised in a hook of the loop's own backward, which has continued
    num_late_gradients = 0  # gradients that arrived after their bucket was sent

    def __init__(self, shard: Shard, pending: PendingGradients, receiver: Receiver, timed: Timed) -> None:
        self._shard = shard
        self._pending = pending
        self._timed = timed
        self._receiver: Receiver | None = receiver
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def begin(self) -> None:
        """Start catching gradients. If this fails, `drop` undoes what it has done."""

    @abstractmethod
    def finish(self) -> None:
        """Hand on what is left, after the backward. Collective."""

    def drop(self) -> None:
        """Remove the hooks, and release all gradients. Not collective."""
        while self._handles:
            self._handles.pop().remove()
        self._pending.replace({})
        self._receiver = None  # it may hold vectors

    def _hand_on(self, index: int, before: Tensor | None = None) -> None:
        """Hand on N times (a bucket's mean over ranks − `before`): the sum over ranks, for the only fold.

        For a backward that reduces gradients itself, with all ranks in one fold. Missing gradients count as zeros.
        """
        assert self._receiver is not None
        bucket = self._pending.buckets[index]
        with self._timed():
            mean = torch.cat(self._pending.take(bucket.names, bucket.sizes))
            if before is not None:
                mean -= before
            self._receiver.take(index, 0, mean.mul_(self._shard.num_ranks).unsqueeze(0))


class SentGradients(CaughtBackward):
    """Sends each bucket to the ranks that keep its entries.

    All ranks send the buckets in the same fixed order. A bucket is sent when it is complete and those before it are
    sent. Gradients still missing at the end are sent as zeros.

    Args:
        shard, pending, receiver, timed: As for any backward. A fold has neighbouring ranks, equally many for each fold.
        exchange: Sends the buckets.
        leaves: Leaves that get hooks, by name. Empty if the caller of the backward puts its gradients into `pending`.
        consume: Nothing else needs the gradients, so they are freed as they arrive.
    """

    def __init__(
        self,
        shard: Shard,
        pending: PendingGradients,
        receiver: Receiver,
        timed: Timed,
        exchange: Exchange,
        leaves: Mapping[str, Tensor],
        consume: bool,
    ) -> None:
        super().__init__(shard, pending, receiver, timed)
        self._exchange = exchange
        # Number of unsent buckets. They are sent last to first, since a backward roughly completes the last ones first.
        self._unsent = len(pending.buckets)
        self._leaves = leaves
        self._consumes = consume

    def begin(self) -> None:
        hook = self._consume if self._consumes else self._catch
        for name, leaf in self._leaves.items():
            self._handles.append(leaf.register_hook(functools.partial(hook, name)))

    def finish(self) -> None:
        while self._unsent:
            self._send_next()

    def _catch(self, name: str, gradient: Tensor) -> None:
        """Take a leaf's gradient from the loop's own backward. With one rank, the backward continues after an error."""
        if self.error is not None:  # autograd still runs the other hooks of a leaf
            return
        try:
            self._take(name, gradient)
        except Exception as error:
            if self._shard.num_ranks > 1:  # the other ranks wait for what this one sends
                error.add_note(ENDS_TRAINING)
                raise
            self.drop()
            traceback.clear_frames(error.__traceback__)  # they hold gradients, and the error may be that memory ran out
            self.error = error

    def _consume(self, name: str, gradient: Tensor) -> Tensor:
        """Take a leaf's gradient from a probe's backward, and replace it by zeros that take no memory."""
        self._take(name, gradient)
        return constant(0.0, gradient.dtype, gradient.device).expand(gradient.shape)

    def _take(self, name: str, gradient: Tensor) -> None:
        if self._pending.bucket_of[name] >= self._unsent:
            self.num_late_gradients += 1
            return
        self._pending.add(name, gradient.detach())
        while self._unsent and self._pending.is_complete(self._unsent - 1):
            self._send_next()

    def _send_next(self) -> None:
        """Send the last unsent bucket."""
        assert self._receiver is not None
        self._unsent -= 1
        names = self._pending.buckets[self._unsent].names
        with self._timed():
            gradients = self._pending.take(names, map(self._shard.numel, names))
            self._exchange.send(names, gradients, self._unsent, self._receiver)


class AccumulatedGradients(CaughtBackward):
    """Takes what the loop's own backward adds to `.grad`."""

    _grads_before: Sequence[Tensor] = ()  # the content of `.grad` before the backward, by bucket

    def begin(self) -> None:
        self._pending.replace(self._shard.gradients())
        self._grads_before = [
            torch.cat(self._pending.take(bucket.names, bucket.sizes)) for bucket in self._pending.buckets
        ]

    def finish(self) -> None:
        self._pending.replace(self._shard.gradients())
        for index, before in enumerate(self._grads_before):
            self._hand_on(index, before)

    def drop(self) -> None:
        super().drop()
        self._grads_before = ()


class ReducedGradients(CaughtBackward):
    """Takes each gradient out of `.grad` as soon as a probe's backward has put it there."""

    def begin(self) -> None:
        self._handed_on = set[int]()
        for name, param in self._shard.trained.items():
            self._handles.append(param.register_post_accumulate_grad_hook(functools.partial(self._catch, name)))

    def finish(self) -> None:
        for index in range(len(self._pending.buckets)):
            if index not in self._handed_on or self._pending.has_any(index):
                self._hand_on(index)

    def _catch(self, name: str, param: Tensor) -> None:
        assert param.grad is not None
        self._pending.add(name, self._shard.local(name, param.grad))
        param.grad = None
        index = self._pending.bucket_of[name]
        if self._pending.is_complete(index):
            self._handed_on.add(index)
            self._hand_on(index)

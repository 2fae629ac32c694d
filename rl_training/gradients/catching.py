"""The gradients of one backward, caught as they arrive and added to rows of folds, in three ways.

    SentGradients      hooks on the leaves; each bucket is sent once it is complete
    GrownGradients     the loop's backward reduces by itself (FSDP2): what it has added to `.grad`
    ReducedGradients   a probe's backward does: each `.grad` as soon as it is reduced, so that never all of them exist

Each begins with `begin`. After a backward that has succeeded comes `finish`, a collective; after one that has
failed, perhaps on this process alone, `drop`, which is none.
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

from rl_training.gradients.exchange import Exchange
from rl_training.parallel.sharding import Shard
from rl_training.parallel.vectors import Vector, constant

NOT_ALONE = "measuring has failed within this process's backward, and the others cannot be told, so training ends"
Timed = Callable[[], AbstractContextManager[None]]  # a context that adds up the time that it takes


class HeldGradients:
    """Gradients that have arrived and are not added to rows yet, by bucket of the layout."""

    def __init__(self, shard: Shard) -> None:
        self._layout = shard.layout
        self.buckets = shard.layout.buckets
        self.bucket_of = {name: number for number, bucket in enumerate(self.buckets) for name in bucket.names}
        self._gradients: dict[str, Tensor] = {}

    def replace(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Hold these and no others."""
        self._gradients = {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def add(self, name: str, gradient: Tensor) -> None:
        """Hold the gradient of a parameter, added to what is held of it."""
        self._gradients[name] = self._gradients[name] + gradient if name in self._gradients else gradient

    def is_complete(self, number: int) -> bool:
        """Return whether all gradients of a bucket are held."""
        return all(name in self._gradients for name in self.buckets[number].names)

    def has_any(self, number: int) -> bool:
        """Return whether some gradient of a bucket is held."""
        return any(name in self._gradients for name in self.buckets[number].names)

    def take(self, names: Sequence[str], sizes: Iterable[int]) -> list[Tensor]:
        """Return the held gradients of these parameters, flat, and hold them no longer.

        Parameters without a gradient get zeros that take no memory.

        Args:
            names: of the parameters.
            sizes: the number of entries of each.
        """
        zero = constant(0.0, self._layout.dtype, self._layout.device)
        return [
            self._gradients.pop(name).reshape(-1).to(self._layout.device)
            if name in self._gradients
            else zero.expand(size)
            for name, size in zip(names, sizes, strict=True)
        ]


class CaughtBackward(ABC):
    """A backward whose gradients are being caught."""

    error: Exception | None = None  # in a hook of the loop's own backward, which has gone on
    num_late_gradients = 0  # that arrived after their bucket was sent

    def __init__(self, shard: Shard, held: HeldGradients, target: Vector, timed: Timed) -> None:
        """Take what the backward is caught for; nothing is caught before `begin`.

        Args:
            shard: of the trained parameters.
            held: where gradients wait.
            target: (folds, n) per bucket, to which they are added.
            timed: returns a context that adds up the time that hooks take.
        """
        self._shard, self._held, self._target, self._timed = shard, held, target, timed
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def begin(self) -> None:
        """Begin to catch gradients. Where this fails, `drop` undoes what it has done."""

    @abstractmethod
    def finish(self) -> None:
        """Add what is left: the backward is over. A collective."""

    def drop(self) -> None:
        """Remove the hooks, and hold nothing. No collective."""
        while self._handles:
            self._handles.pop().remove()
        self._held.replace({})
        self._target = []


class SentGradients(CaughtBackward):
    """Sends each bucket to the processes that keep its entries.

    All processes send the buckets in one fixed order: a bucket is sent when it is complete and those before it are
    sent; gradients that are missing at the end are sent as zeros.
    """

    def __init__(
        self,
        shard: Shard,
        held: HeldGradients,
        target: Vector,
        timed: Timed,
        exchange: Exchange,
        leaves: Mapping[str, Tensor],
        consume: bool,
    ) -> None:
        """Take where the gradients go.

        Args:
            shard, held, target, timed: as of any backward. The processes of a fold are neighbours, equally many for
                each fold.
            exchange: sends the buckets.
            leaves: that get hooks, by name; none where `held` gets the gradients from what has called the backward.
            consume: nobody else needs the gradients, so they are freed as they arrive.
        """
        super().__init__(shard, held, target, timed)
        self._exchange = exchange
        # The number of unsent buckets, which are the first ones: a backward roughly completes the last ones first.
        self._unsent = len(held.buckets)
        self._leaves, self._consumes = leaves, consume

    def begin(self) -> None:
        hook = self._consume if self._consumes else self._catch
        for name, leaf in self._leaves.items():
            self._handles.append(leaf.register_hook(functools.partial(hook, name)))

    def finish(self) -> None:
        while self._unsent:
            self._send_next()

    def _catch(self, name: str, gradient: Tensor) -> None:
        """Take a leaf's gradient of the loop's own backward, which an error here does not end on a single process."""
        if self.error is not None:  # autograd runs the hooks of a leaf that it has begun
            return
        try:
            self._take(name, gradient)
        except Exception as error:
            if self._shard.num_ranks > 1:  # the others wait for what this process sends
                error.add_note(NOT_ALONE)
                raise
            self.drop()
            traceback.clear_frames(error.__traceback__)  # they hold gradients, and memory may be what is missing
            self.error = error

    def _consume(self, name: str, gradient: Tensor) -> Tensor:
        """Take a leaf's gradient of a probe's backward, and replace it by zeros that take no memory."""
        self._take(name, gradient)
        return constant(0.0, gradient.dtype, gradient.device).expand(gradient.shape)

    def _take(self, name: str, gradient: Tensor) -> None:
        if self._held.bucket_of[name] >= self._unsent:
            self.num_late_gradients += 1
            return
        self._held.add(name, gradient.detach())
        while self._unsent and self._held.is_complete(self._unsent - 1):
            self._send_next()

    def _send_next(self) -> None:
        """Send the last unsent bucket."""
        self._unsent -= 1
        names = self._held.buckets[self._unsent].names
        with self._timed():
            gradients = self._held.take(names, map(self._shard.numel, names))
            self._exchange.add(names, gradients, self._target[self._unsent])


class ReducedBackward(CaughtBackward):
    """A backward that reduces by itself, where all processes are in one fold: `.grad` has means over processes."""

    def _add(self, number: int, before: Tensor | None = None) -> None:
        """Add what is held of a bucket, less what was there before, to the only row. Missing gradients are zeros."""
        bucket, rows = self._held.buckets[number], self._target[number]
        if self._held.has_any(number):
            with self._timed():
                mean = torch.cat(self._held.take(bucket.names, bucket.sizes))
                if before is not None:
                    mean -= before
                rows[0].add_(mean.to(rows), alpha=self._shard.num_ranks)


class GrownGradients(ReducedBackward):
    """What the loop's own backward adds to `.grad`."""

    _before: Sequence[Tensor] = ()  # what was there, by bucket

    def begin(self) -> None:
        self._held.replace(self._shard.gradients())
        self._before = [torch.cat(self._held.take(bucket.names, bucket.sizes)) for bucket in self._held.buckets]

    def finish(self) -> None:
        self._held.replace(self._shard.gradients())
        for number, before in enumerate(self._before):
            self._add(number, before)

    def drop(self) -> None:
        super().drop()
        self._before = ()


class ReducedGradients(ReducedBackward):
    """What a probe's backward leaves in `.grad`, taken out of it at once."""

    def begin(self) -> None:
        for name, param in self._shard.trained.items():
            self._handles.append(param.register_post_accumulate_grad_hook(functools.partial(self._catch, name)))

    def finish(self) -> None:
        for number in range(len(self._held.buckets)):
            self._add(number)

    def _catch(self, name: str, param: Tensor) -> None:
        assert param.grad is not None
        self._held.add(name, self._shard.local(name, param.grad))
        param.grad = None
        number = self._held.bucket_of[name]
        if self._held.is_complete(number):
            self._add(number)

"""δθ of a step, piece by piece: the optimizer's step from its present state, clipped by the gradient's norm."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.optim.formula import OptimizerState, UpdateParts
from rl_training.optim.rounding import kept_share, rounded_update
from rl_training.parallel.fusion import BLOCK, Product, uncompiled_sums
from rl_training.parallel.vectors import Layout, Vector, constant, join

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm

# A vector by bucket, or its tensors by parameter name, which are joined one piece at a time.
Entries = Vector | Mapping[str, Tensor]


@dataclass(frozen=True)
class ParameterSpan:
    """Neighbouring entries of one bucket that the optimizer treats alike."""

    bucket: int  # index of the bucket
    columns: slice  # the span within the bucket
    names: tuple[str, ...]  # the parameters that the optimizer treats alike
    joined_columns: slice  # the span within the joined entries of `names`
    parameter_indices: slice  # the indices of `names` among all parameters
    sizes: tuple[int, ...]  # how many entries of each of `names` are in the span, perhaps 0

    def of(self, vector: Entries) -> Tensor:
        """Return the span's entries of one vector, (n,), or of several, (vectors, n)."""
        if isinstance(vector, Mapping):
            return self.joined(vector[name] for name in self.names)
        return vector[self.bucket][..., self.columns]

    def joined(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the span's entries, (n,), given the tensors of `names` in order. A single tensor is not copied."""
        return join([tensor.detach().reshape(-1) for tensor in tensors])[self.joined_columns]


@dataclass(frozen=True)
class OptimizerPiece(ParameterSpan):
    """A span with its weights and their optimizer state as vectors."""

    param: Tensor  # the weights before the step, (n,), in their own dtype
    state: OptimizerState  # with (n,) tensors, in at least fp32

    def unrounded(self, gradient: Tensor) -> Tensor:
        """Return the update for a clipped gradient, (…, n), before the weights are rounded."""
        return self.state.total(self.param.to(gradient.dtype), gradient)

    def total(self, gradient: Tensor) -> Tensor:
        """Return the update for a clipped gradient, (…, n), after the weights are rounded."""
        return rounded_update(self.param, self.unrounded(gradient))

    def delta(self, gradient: Tensor) -> UpdateParts:
        """Return the parts of `total`. In each entry, rounding keeps the same share of every part."""
        parts = self.state.delta(self.param.to(gradient.dtype), gradient)
        if self.param.dtype == gradient.dtype:
            return parts
        share = kept_share(self.param, parts.total)
        return UpdateParts(*(share * part for part in parts))

    def products(self, gradient: Tensor, x: Tensor) -> tuple[Product, ...]:
        """Return the products x · δθ by cause.

        Args:
            gradient: The clipped gradient, (…, n).
            x: (…, n).
        """
        if self.param.dtype != gradient.dtype:  # rounding keeps the same share of every part
            x = x * kept_share(self.param, self.unrounded(gradient))
        return self.state.products(self.param.to(gradient.dtype), gradient, x)

    def effects(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return x · δθ by cause and by parameter, (…, causes, parameters of this piece) fp64. See `products`."""
        return uncompiled_sums(self.products(gradient, x), self.sizes).movedim(0, -2)

    @property
    def is_smooth(self) -> bool:
        """Whether the update changes in proportion to the gradient. One whose weights are rounded does not."""
        return self.param.dtype == torch.promote_types(self.param.dtype, torch.float32) and self.state.is_smooth

    def gradient_factor(self, gradient: Tensor) -> Tensor:
        """Return the elementwise factor a that makes `delta(gradient).gradient` equal a · gradient."""
        factor = self.state.gradient_factor(self.param.to(gradient.dtype), gradient)
        if self.param.dtype == gradient.dtype:
            return factor
        return factor * kept_share(self.param, self.unrounded(gradient))


class OptimizerPieces:
    """The parameters and their optimizer state as consecutive pieces; no pieces if the step has no formula.

    Small neighbours with the same settings are joined (decoupled weight decay may differ), which copies them. Unless
    the model is small, a copy lives only while its piece is in use. Large parameters are cut and not copied.

    Args:
        layout: The layout of the parameters.
        parameters: This rank's entries before the step, by name.
        states: The optimizer's states, by name. None: the step has no formula.
        chunk_size: The largest number of entries in a piece. None: the layout's.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, Tensor],
        states: Mapping[str, OptimizerState] | None,
        chunk_size: int | None = None,
    ) -> None:
        self.layout = layout
        self._parameters = parameters
        self._states = states or {}
        self._chunk_size = chunk_size or layout.chunk_size
        self._spans = list(_iter_spans(layout, parameters, states, self._chunk_size)) if states else []
        self._by_bucket: dict[int, list[int]] = {}
        for index, span in enumerate(self._spans):
            self._by_bucket.setdefault(span.bucket, []).append(index)
        self._cached = [self._piece(span) for span in self._spans] if layout.is_small else None

    @property
    def spans(self) -> Sequence[ParameterSpan]:
        """The pieces without weights and states, which takes no copies."""
        return self._spans

    def __iter__(self) -> Iterator[OptimizerPiece]:
        return map(self._piece, self._spans) if self._cached is None else iter(self._cached)

    def within(self, bucket: int, columns: slice) -> Iterator[OptimizerPiece]:
        """Yield the pieces that lie in these columns of a bucket. No piece may lie there in part."""
        for index in self._by_bucket.get(bucket, ()):
            span = self._spans[index]
            if columns.start <= span.columns.start and span.columns.stop <= columns.stop:
                yield self._piece(span) if self._cached is None else self._cached[index]

    def halved(self) -> OptimizerPieces:
        """Return pieces half as long, for callers that hold several vectors per piece. Small models' stay the same."""
        if self._cached is not None:
            return self
        return OptimizerPieces(self.layout, self._parameters, self._states, max(1, self._chunk_size // 2))

    def _piece(self, span: ParameterSpan) -> OptimizerPiece:
        states = [self._states[name] for name in span.names]
        tensors: dict[str, Any] = {
            key: span.joined(getattr(state, key) for state in states).to(self.layout.dtype)
            for key, value in vars(states[0]).items()
            if isinstance(value, Tensor)
        }
        if len({state.weight_decay for state in states}) > 1:  # as for matrices and norms
            tensors["weight_decay"] = span.joined(map(self._decay_by_entry, span.names))
        return OptimizerPiece(**vars(span), param=span.of(self._parameters), state=states[0].replace(**tensors))

    def _decay_by_entry(self, name: str) -> Tensor:
        """Return a parameter's weight decay by entry, as an expanded scalar that takes no memory."""
        decay = constant(self._states[name].weight_decay, self.layout.dtype, self.layout.device)
        return decay.expand_as(self._parameters[name])


def _iter_spans(
    layout: Layout, parameters: Mapping[str, Tensor], states: Mapping[str, OptimizerState], chunk_size: int
) -> Iterator[ParameterSpan]:
    offset = 0  # number of parameters in the previous buckets
    for index, bucket in enumerate(layout.buckets):
        bounds = [columns for _, columns in bucket.bounds()]
        for first, last in _group_by_settings(bucket.names, parameters, states):
            start = bounds[first].start
            stop = bounds[last - 1].stop
            for begin in range(start, stop, chunk_size):
                end = min(begin + chunk_size, stop)
                sizes = (max(0, min(entries.stop, end) - max(entries.start, begin)) for entries in bounds[first:last])
                yield ParameterSpan(
                    bucket=index,
                    columns=slice(begin, end),
                    names=bucket.names[first:last],
                    joined_columns=slice(begin - start, end - start),
                    parameter_indices=slice(offset + first, offset + last),
                    sizes=tuple(sizes),
                )
        offset += len(bucket.names)


def _group_by_settings(
    names: Sequence[str], parameters: Mapping[str, Tensor], states: Mapping[str, OptimizerState]
) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each run of parameters with equal settings; with `can_join_decays`, decays may differ."""

    def settings(name: str) -> tuple[Any, ...]:
        state = states[name]
        numbers = {key: value for key, value in vars(state).items() if not isinstance(value, Tensor)}
        if state.can_join_decays:
            del numbers["weight_decay"]
        return type(state), parameters[name].dtype, numbers

    first = 0
    for _, run in itertools.groupby(names, settings):
        last = first + len(list(run))
        yield first, last
        first = last


def clip_coefficient(grad_norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor min(1, max_norm / (norm + 1e-6)) by which torch.nn.utils.clip_grad_norm_ scales a gradient."""
    return torch.clamp(max_norm / (grad_norm + CLIP_EPSILON), max=1.0)


def clip_factors(square_norm: Tensor, max_grad_norm: float) -> Tensor:
    """Return the clipping factors of gradients with these squared norms."""
    return clip_coefficient(square_norm.double().sqrt(), max_grad_norm)


@dataclass(frozen=True)
class StepUpdate:
    """What the update δθ of a step is made of, by the optimizer's formula.

    Small models keep δθ as a vector. Otherwise it is calculated piece by piece, wherever it is multiplied.
    """

    pieces: OptimizerPieces
    mean: Entries  # the mean gradient, before clipping
    clip: float  # the clipping factor
    vector: Vector | None = None  # δθ, if it is kept, which takes weights that are not rounded

    @functools.cached_property
    def clip_tensor(self) -> Tensor | None:
        """The clipping factor as a tensor, (). None if nothing is clipped, which saves an uncompiled pass."""
        layout = self.pieces.layout
        if self.clip == 1.0 and not layout.fusion.is_on:
            return None
        return torch.full((), self.clip, dtype=layout.dtype, device=layout.device)

    def gradient(self, piece: OptimizerPiece) -> Tensor:
        """Return a piece's entries of the clipped gradient, (n,)."""
        return scaled(piece.of(self.mean), self.clip_tensor)


def scaled(mean: Tensor, factor: Tensor | None) -> Tensor:
    """Return a gradient times the clipping factor of `StepUpdate`."""
    return mean if factor is None else factor * mean


def compute_update(layout: Layout, step_update: StepUpdate, out: Vector | None = None) -> Vector:
    """Return δθ of a step before the weights are rounded, as a vector, written over `out` if it is given."""
    out = out or layout.zeros()
    for piece in step_update.pieces:
        arguments = piece, piece.of(step_update.mean), step_update.clip_tensor
        entries = layout.fusion.entries(_unrounded, BLOCK, len(piece.param), *arguments)
        piece.of(out).copy_((_unrounded(*arguments) if entries is None else entries).view(-1))
    return out


def _unrounded(piece: OptimizerPiece, mean: Tensor, factor: Tensor | None) -> Tensor:
    return piece.unrounded(scaled(mean, factor))


def sqrt_preconditioner(
    layout: Layout, parameters: Mapping[str, Tensor], states: Mapping[str, OptimizerState] | None
) -> Vector:
    """Return √P of the previous step, (n,) per bucket; nan for parameters whose state has no metric."""
    sqrt_p = [torch.full_like(part, torch.nan) for part in layout.zeros()]
    for piece in OptimizerPieces(layout, parameters, states):
        preconditioner = piece.state.preconditioner()
        if preconditioner is not None:
            piece.of(sqrt_p).copy_(preconditioner.sqrt_())
    return sqrt_p

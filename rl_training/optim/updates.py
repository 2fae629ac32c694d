"""The parameter change of an optimizer step, piece by piece: the real one, and what it would have been without a fold.

    WHOLE       δθ of the step, from the mean gradient g
    without k   δθ_(−k), the step that the other folds alone would have made, from g_(−k) = (N g − n_k g_k) / (N − n_k)

each the optimizer's own step from its present state, clipped by its own gradient's norm. The steps without a fold are
made where their products with an entropy gradient are taken, a slice of a parameter at a time, and are never kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.gradients.folds import leave_out_coefficients
from rl_training.optim.adamw import AdamWState, UpdateParts, clip_coefficient
from rl_training.optim.rounding import kept_share, rounded_update
from rl_training.optim.sgd import SGDState
from rl_training.parallel.vectors import Layout, Vector, constant, join, sums_of_spans

CAUSES = ("momentum", "gradient", "decay")  # the fields of UpdateParts, in their order
EVERY_FOLD = slice(None)

# A vector by bucket, or as tensors that somebody else holds, by name: these are joined a piece at a time.
Entries = Vector | Mapping[str, Tensor]


@dataclass(frozen=True)
class ParameterSpan:
    """Neighbouring entries of one bucket that the optimizer treats alike."""

    bucket: int
    columns: slice  # of the bucket
    flat: slice  # of all parameters, one after another
    names: tuple[str, ...]
    cut: slice  # of the entries of these parameters
    parameters: slice  # their numbers
    sizes: tuple[int, ...]  # how many entries of each are in it; of some none

    def of(self, vector: Entries) -> Tensor:
        """Return these entries of a vector, (n,), or of several, (rows, n)."""
        if isinstance(vector, Mapping):
            return self.joined(vector[name] for name in self.names)
        return vector[self.bucket][..., self.columns]

    def joined(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return these entries of the parameters' tensors, (n,); of a single one they are not copied."""
        return join([tensor.detach().reshape(-1) for tensor in tensors])[self.cut]


@dataclass(frozen=True)
class OptimizerPiece(ParameterSpan):
    """A run with its parameters and their optimizer's state, as vectors."""

    param: Tensor  # (n,), before the step, as it is kept
    state: AdamWState | SGDState  # of (n,) tensors, in at least fp32

    def intended(self, gradient: Tensor) -> Tensor:
        """Return the optimizer's step with a clipped gradient, (…, n)."""
        return self.state.total(self.param.to(gradient.dtype), gradient)

    def total(self, gradient: Tensor) -> Tensor:
        """Return what the rounding of the weights leaves of it."""
        return rounded_update(self.param, self.intended(gradient))

    def delta(self, gradient: Tensor) -> UpdateParts:
        """Return the parts of `total`: of an entry, rounding leaves of each the same share."""
        parts = self.state.delta(self.param.to(gradient.dtype), gradient)
        if self.param.dtype == gradient.dtype:
            return parts
        share = kept_share(self.param, parts.total)
        return UpdateParts(*(share * part for part in parts))

    def gradient_factor(self, gradient: Tensor) -> Tensor:
        """Return a, elementwise: `delta(gradient).gradient` is a · gradient."""
        factor = self.state.gradient_factor(self.param.to(gradient.dtype), gradient)
        if self.param.dtype == gradient.dtype:
            return factor
        return factor * kept_share(self.param, self.intended(gradient))


class OptimizerPieces:
    """The parameters and their optimizer's states in pieces that follow one another; none without a formula.

    Small neighbours that are alike, of AdamW but for their weight decay, are joined, as copies that last as long as
    their piece is in use, or as all pieces where these are few entries; large parameters are cut, and not copied.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, Tensor],
        states: Mapping[str, AdamWState | SGDState] | None,
        chunk_size: int | None = None,
    ) -> None:
        """chunk_size: entries of a piece at most; None: as the layout has them."""
        self._layout = layout
        self._parameters = parameters
        self._states = states or {}
        self._chunk_size = chunk_size or layout.chunk_size
        self._runs = list(_runs(layout, parameters, states, self._chunk_size)) if states else []
        self._kept = list(self._made()) if layout.is_small else None

    def __iter__(self) -> Iterator[OptimizerPiece]:
        return self._made() if self._kept is None else iter(self._kept)

    def halved(self) -> OptimizerPieces:
        """Return pieces of half as many entries, for who holds several vectors of each; the same of few entries."""
        if self._kept is not None:
            return self
        return OptimizerPieces(self._layout, self._parameters, self._states, max(1, self._chunk_size // 2))

    def _made(self) -> Iterator[OptimizerPiece]:
        for run in self._runs:
            alike = [self._states[name] for name in run.names]
            moments: dict[str, Any] = {
                key: run.joined(getattr(state, key) for state in alike).to(self._layout.dtype)
                for key, value in vars(alike[0]).items()
                if isinstance(value, Tensor)
            }
            if len({state.weight_decay for state in alike}) > 1:  # as of matrices and norms
                moments["weight_decay"] = run.joined(map(self._decays, run.names))
            yield OptimizerPiece(
                **vars(run), param=run.of(self._parameters), state=dataclasses.replace(alike[0], **moments)
            )

    def _decays(self, name: str) -> Tensor:
        """Return the weight decay of a parameter's entries, which takes no memory."""
        decay = constant(self._states[name].weight_decay, self._layout.dtype, self._layout.device)
        return decay.expand_as(self._parameters[name])


def _runs(
    layout: Layout, parameters: Mapping[str, Tensor], states: Mapping[str, AdamWState | SGDState], chunk_size: int
) -> Iterator[ParameterSpan]:
    before = 0  # parameters in the buckets before
    for number, bucket in enumerate(layout.buckets):
        bounds = [columns for _, columns in bucket.bounds()]
        for first, last in _alike(bucket.names, parameters, states):
            start = bounds[first].start
            stop = bounds[last - 1].stop
            for begin in range(start, stop, chunk_size):
                end = min(begin + chunk_size, stop)
                sizes = (max(0, min(entries.stop, end) - max(entries.start, begin)) for entries in bounds[first:last])
                yield ParameterSpan(
                    bucket=number,
                    columns=slice(begin, end),
                    flat=slice(bucket.start + begin, bucket.start + end),
                    names=bucket.names[first:last],
                    cut=slice(begin - start, end - start),
                    parameters=slice(before + first, before + last),
                    sizes=tuple(sizes),
                )
        before += len(bucket.names)


def _alike(
    names: Sequence[str], parameters: Mapping[str, Tensor], states: Mapping[str, AdamWState | SGDState]
) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the longest runs of parameters with the same settings; AdamW's weight decay may differ."""

    def settings(name: str) -> tuple[Any, ...]:
        state = states[name]
        numbers = {key: value for key, value in vars(state).items() if not isinstance(value, Tensor)}
        if isinstance(state, AdamWState) and state.decoupled:
            del numbers["weight_decay"]
        return type(state), parameters[name].dtype, numbers

    first = 0
    for _, run in itertools.groupby(names, settings):
        last = first + len(list(run))
        yield first, last
        first = last


def clipping(square_norm: Tensor, max_grad_norm: float) -> Tensor:
    """Return the factors by which gradients of these square norms are clipped."""
    return clip_coefficient(square_norm.double().sqrt(), max_grad_norm)


def compute_update(layout: Layout, pieces: Iterable[OptimizerPiece], gradient: Entries, clip: float) -> Vector:
    """Return δθ of the step with this mean gradient, before the weights are rounded."""
    update = layout.zeros()
    for piece in pieces:
        piece.of(update).copy_(piece.intended(clip * piece.of(gradient)))
    return update


def split_products(
    parts: Iterable[tuple[OptimizerPiece, UpdateParts]], directions: Sequence[Vector], num_parameters: int
) -> Tensor:
    """Return X · δθ by cause and by parameter, (causes + parameters, directions) fp64, of one step in pieces, (n,)."""
    by_both = directions[0][0].new_zeros(len(CAUSES), num_parameters, len(directions), dtype=torch.float64)
    for piece, step in parts:
        causes = torch.stack(step)
        del step
        for target, x in enumerate(directions):
            sums = sums_of_spans((causes * piece.of(x)).flatten(), piece.sizes * len(CAUSES))
            by_both[:, piece.parameters, target].add_(sums.view(len(CAUSES), -1))
        del causes  # before the next piece is made
    return torch.cat([by_both.sum(dim=1), by_both.sum(dim=0)])


def sqrt_preconditioner(
    layout: Layout, parameters: Mapping[str, Tensor], states: Mapping[str, AdamWState | SGDState] | None
) -> Vector:
    """Return √P of the step before; nan for the entries of parameters without a warm state of AdamW's."""
    sqrt_p = [torch.full_like(part, torch.nan) for part in layout.zeros()]
    for piece in OptimizerPieces(layout, parameters, states):
        if isinstance(piece.state, AdamWState) and piece.state.is_warm:
            piece.of(sqrt_p).copy_(piece.state.preconditioner().sqrt_())
    return sqrt_p


@dataclass(frozen=True)
class FoldMeans:
    """A gradient's mean over all folds, and over each: this process's entries."""

    mean: Entries
    rows: Vector  # (F, n) of each bucket, perhaps in host memory, or in bf16
    sizes: Tensor  # (F,) fp64, n_k
    share_of_mean: Tensor  # (F, 1), where the entries are
    share_of_fold: Tensor  # (F, 1)

    def without(self, folds: int | slice, piece: OptimizerPiece, mean: Tensor | None = None) -> Tensor:
        """Return g_(−k) of a fold, (n,), or of some, (folds, n), where the parameters are.

        mean  its entries in this piece, where they are at hand
        """
        mean = piece.of(self.mean) if mean is None else mean
        rows = piece.of(self.rows)[folds].to(mean)
        return (rows * self.share_of_fold[folds]).addcmul_(self.share_of_mean[folds], mean)  # in two passes


def fold_means(mean: Entries, rows: Vector, sizes: Tensor, total_size: float | None = None) -> FoldMeans:
    """Return a gradient by fold, with what it takes to leave one out. ValueError when a fold is everything.

    total_size  of all folds; None where these are all
    """
    entries = next(iter(mean.values() if isinstance(mean, Mapping) else mean))
    shares = torch.stack(leave_out_coefficients(sizes, total_size)).to(entries).unsqueeze(2)
    return FoldMeans(mean, rows, sizes, *shares)


class LeaveOneOutUpdates:
    """The steps that the optimizer would make without each fold, each clipped by its own gradient's norm.

    Making it is a collective, of one pass over all entries.

    gradient  not clipped
    clip      the factor by which that of all folds is clipped
    """

    def __init__(
        self,
        pieces: OptimizerPieces,
        gradient: FoldMeans,
        max_grad_norm: float,
        reduce: Callable[[Tensor], Tensor],
        clip: float = 1.0,
    ) -> None:
        self.pieces = pieces
        self.gradient = gradient
        self.max_grad_norm = max_grad_norm
        self.clip = clip
        squares = torch.zeros_like(gradient.share_of_mean[:, 0], dtype=torch.float64)
        for piece in pieces:
            # Of the vectors themselves: from products of g and g_k it would cancel where one fold is nearly all of g.
            squares += gradient.without(EVERY_FOLD, piece).square_().sum(dim=-1).double()
        # (F,) fp64 in host memory, the factor by which the gradient without each fold is clipped.
        self.clips = clipping(reduce(squares).cpu(), max_grad_norm)

    def changes(self, piece: OptimizerPiece) -> Iterator[Tensor]:
        """Yield by how much the parts of the step change without one fold after another in this piece, (causes, n)."""
        mean = piece.of(self.gradient.mean)
        whole = torch.stack(piece.delta(self.clip * mean))
        for fold, clip in enumerate(self.clips.tolist()):
            yield torch.stack(piece.delta(self.gradient.without(fold, piece, mean).mul_(clip))).sub_(whole)

    def parts(self, fold: int) -> Iterator[tuple[OptimizerPiece, UpdateParts]]:
        """Yield each piece and the step without a fold in it."""
        for piece in self.pieces:
            yield piece, piece.delta(self.gradient.without(fold, piece).mul_(float(self.clips[fold])))

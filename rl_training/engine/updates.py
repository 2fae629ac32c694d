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

from rl_training.engine.kept_vector import KeptVector
from rl_training.mathematics.adamw import AdamWState, UpdateParts, clip_coefficient
from rl_training.mathematics.folds import shares_of_others
from rl_training.mathematics.sgd import SGDState
from rl_training.mathematics.vectors import SLICE, Layout, Vector, join, num_bytes, rows_dot

CAUSES = ("momentum", "gradient", "decay")  # the fields of UpdateParts, in their order
EVERY_FOLD = slice(None)


@dataclass(frozen=True)
class Piece:
    """Neighbouring entries of one bucket that the optimizer treats alike, as one vector."""

    bucket: int
    columns: slice  # of the bucket
    flat: slice  # of all parameters, one after another
    param: Tensor  # (n,), before the step
    state: AdamWState | SGDState  # of (n,) tensors
    spans: tuple[tuple[int, slice], ...]  # the number of each parameter in it, and its entries

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.spans]

    def of(self, vector: Vector) -> Tensor:
        """Returns these entries of a vector, (n,), or of several, (rows, n)."""
        return vector[self.bucket][..., self.columns]


def optimizer_pieces(
    layout: Layout,
    parameters: Mapping[str, Tensor],
    states: Mapping[str, AdamWState | SGDState] | None,
    longest: int = SLICE,
) -> list[Piece]:
    """Returns the parameters and their optimizer's states in pieces that follow one another; none without a formula.

    Small neighbours that are alike are joined, as copies; large parameters are cut, and not copied.
    """
    pieces: list[Piece] = []
    if states is None:
        return pieces
    numbers = {name: number for number, name in enumerate(layout.names)}
    for number, bucket in enumerate(layout.buckets):
        bounds = list(bucket.bounds())
        for first, last in _alike(bucket.names, parameters, states):
            names = bucket.names[first:last]
            start = bounds[first][1].start
            alike = [states[name] for name in names]
            tensors = [key for key, value in vars(alike[0]).items() if isinstance(value, Tensor)]
            flat: dict[str, Tensor] = {
                key: join([getattr(state, key).reshape(-1) for state in alike]) for key in tensors
            }
            param = join([parameters[name].detach().reshape(-1) for name in names])
            for begin in range(0, len(param), longest):
                cut = slice(begin, min(begin + longest, len(param)))
                moments: dict[str, Any] = {key: value[cut] for key, value in flat.items()}
                state = dataclasses.replace(alike[0], **moments)
                columns = slice(start + cut.start, start + cut.stop)
                whole = slice(bucket.start + columns.start, bucket.start + columns.stop)
                own = ((numbers[name], _within(columns, part)) for name, part in bounds[first:last])
                spans = tuple((parameter, span) for parameter, span in own if span.start < span.stop)
                pieces.append(Piece(number, columns, whole, param[cut], state, spans))
    return pieces


def _within(columns: slice, part: slice) -> slice:
    """Returns which of these columns lie in the part, counted from the first of them; empty where none does."""
    start = max(part.start, columns.start)
    return slice(start - columns.start, max(min(part.stop, columns.stop), start) - columns.start)


def _alike(
    names: Sequence[str], parameters: Mapping[str, Tensor], states: Mapping[str, AdamWState | SGDState]
) -> Iterator[tuple[int, int]]:
    """Yields the bounds of the longest runs of parameters with the same settings."""

    def settings(name: str) -> tuple[Any, ...]:
        state = states[name]
        numbers = {key: value for key, value in vars(state).items() if not isinstance(value, Tensor)}
        return type(state), parameters[name].dtype, numbers

    first = 0
    for _, run in itertools.groupby(names, settings):
        last = first + len(list(run))
        yield first, last
        first = last


def clipping(square_norm: Tensor, max_grad_norm: float) -> Tensor:
    """Returns the factors by which gradients of these square norms are clipped."""
    return clip_coefficient(square_norm.double().sqrt(), max_grad_norm)


def whole_update(layout: Layout, pieces: Sequence[Piece], gradient: Vector, clip: float) -> Vector:
    """Returns δθ of the step with this mean gradient."""
    update = layout.zeros()
    for piece in pieces:
        piece.of(update).copy_(piece.state.delta(piece.param, clip * piece.of(gradient)).total)
    return update


def split_products(
    parts: Iterable[tuple[Piece, UpdateParts]], directions: Sequence[Vector], num_parameters: int
) -> Tensor:
    """Returns X · δθ by parameter and cause, (parameters, directions, causes) fp64, of one step in pieces."""
    products = directions[0][0].new_zeros(num_parameters, len(directions), len(CAUSES), dtype=torch.float64)
    for piece, by_cause in parts:
        causes = torch.stack([part.expand_as(by_cause.gradient).flatten() for part in by_cause])  # (causes, n)
        for target, x in enumerate(directions):
            values = piece.of(x)
            products[piece.numbers, target] += torch.stack(
                [rows_dot(causes[:, span], values[span]) for _, span in piece.spans]
            )
    return products


@dataclass(frozen=True)
class FoldMeans:
    """A gradient's mean over all folds, and over each: this process's entries."""

    mean: Vector
    rows: Vector  # (F, n) of each bucket, perhaps in host memory
    sizes: Tensor  # (F,) fp64, n_k
    share_of_mean: Tensor  # (F, 1), where the entries are
    share_of_fold: Tensor  # (F, 1)

    def without(self, folds: slice, piece: Piece) -> Tensor:
        """Returns g_(−k) of some folds, (folds, n), where the parameters are."""
        mean = piece.of(self.mean)
        rows = piece.of(self.rows)[folds].to(mean.device)
        return torch.addcmul(rows * self.share_of_fold[folds], self.share_of_mean[folds], mean)  # in two passes


def fold_means(mean: Vector, rows: Vector, sizes: Tensor, total_size: float | None = None) -> FoldMeans:
    """Returns a gradient by fold, with what it takes to leave one out. ValueError when a fold is everything.

    total_size  of all folds; None where these are all
    """
    shares = (share.to(mean[0]).unsqueeze(1) for share in shares_of_others(sizes, total_size))
    return FoldMeans(mean, rows, sizes, *shares)


@dataclass(frozen=True)
class StepsWithoutFolds:
    """The steps that the optimizer would make without each fold, from gradients that are not clipped."""

    pieces: Sequence[Piece]
    gradient: FoldMeans
    max_grad_norm: float
    clips: Tensor  # (F,) fp64 in host memory, the factor by which the gradient without each fold is clipped

    def parts(self, folds: slice = EVERY_FOLD, *, clipped: bool = True) -> Iterator[tuple[Piece, UpdateParts]]:
        """Yields each piece and the parts of some folds' steps in it, (folds, n)."""
        for piece in self.pieces:
            gradient = self.gradient.without(folds, piece)
            if clipped:
                gradient.mul_(self.clips[folds].to(gradient).unsqueeze(1))
            yield piece, piece.state.delta(piece.param, gradient)


def steps_without_folds(
    pieces: Sequence[Piece], gradient: FoldMeans, max_grad_norm: float, reduce: Callable[[Tensor], Tensor]
) -> StepsWithoutFolds:
    """Returns the steps, each clipped by its own gradient's norm: one pass over all entries. A collective."""
    squares = torch.zeros(len(gradient.sizes), dtype=torch.float64, device=gradient.mean[0].device)
    if max_grad_norm != float("inf"):
        for piece in pieces:
            without = gradient.without(EVERY_FOLD, piece)
            squares += torch.linalg.vector_norm(without, dim=-1, dtype=torch.float64).square()
    return StepsWithoutFolds(pieces, gradient, max_grad_norm, clipping(reduce(squares).cpu(), max_grad_norm))


class UpdateHistory(KeptVector):
    """δθ of the step before, for `backward`: it goes into the checkpoint.

    Where a step has no formula, the parameters before it are kept until those after it are there.
    """

    _before: Vector | None = None
    _why_unknown = ""  # why δθ of the step that was kept is not known

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + num_bytes(self._before)

    def before(self, step: int) -> Vector | None:
        """Returns δθ of step − 1, None if it is not known."""
        return self.vector if self.step == step - 1 and not self._why_unknown else None

    def why_none(self, step: int) -> str:
        """Returns why δθ of step − 1 is not known, "" if it is."""
        if self.step is None:
            return "this is the first measured step: there is no earlier update to look back on"
        if self.step != step - 1:
            return f"step {step - 1} was not measured, so its update is not known; backward needs every=1"
        return self._why_unknown

    def keep(self, step: int, update: Vector | None, parameters: Vector) -> None:
        """Keeps this step's δθ; where there is none, a copy of the parameters that it starts from."""
        self.step, self.vector, self._why_unknown = step, update, ""
        self._before = None if update is not None else [part.clone() for part in parameters]

    def finish(self, step: int, parameters: Vector) -> None:
        """Stores δθ of a step without a formula, as the difference of the parameters after and before it."""
        if self._before is not None and self.is_open(step):
            self.vector = [new - old for new, old in zip(parameters, self._before, strict=True)]
            self._before = None

    def forget(self, reason: str) -> None:
        """Discards δθ of the step that was kept last: the step was another one."""
        self._why_unknown = f"step {self.step}: {reason}"

    def is_open(self, step: int) -> bool:
        """Returns whether `finish` still needs the parameters after this step."""
        return self._before is not None and self.step == step

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self._why_unknown else super().state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._before, self._why_unknown = None, ""
        super().load_state_dict(state)

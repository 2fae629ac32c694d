"""Gradients kept beside training: a matrix of flat gradient vectors, and the leaf hooks that fill it.

`GradientBuffer` holds several vectors over the same named parameters as one matrix, so that an inner product with all
of them is one matrix product per parameter. `GradientTap` catches the gradient of each microbatch as autograd hands it
to the parameters. A hook on the leaf sees this rank's gradient of this microbatch alone — before DDP averages it and
before it is added to `.grad` — which differences of `.grad` do not give on the last microbatch under DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rl_training.adamw import AdamWState

CHUNK = 2**20  # columns whose products are summed in fp32; beyond that, in fp64


class GradientBuffer:
    """`num_rows` vectors over the same named parameters: a (num_rows, P) matrix, at least fp32, all zero at first.

    device   where it lies, that of the parameters by default; on another one, "cpu", every product goes through there
    Example: GradientBuffer({"w": torch.zeros(2, 3)}, num_rows=4).view("w").shape == (4, 2, 3)
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], num_rows: int, device: torch.device | str | None = None
    ) -> None:
        if not parameters:
            raise ValueError("there is no trainable parameter to keep gradients of")
        first = next(iter(parameters.values()))
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self._columns: dict[str, slice] = {}
        start = 0
        for name, p in parameters.items():
            self._columns[name] = slice(start, start + p.numel())
            start += p.numel()
        dtype = torch.promote_types(first.dtype, torch.float32)
        self._home = first.device
        self.matrix = torch.zeros(num_rows, start, dtype=dtype, device=device or first.device)

    @property
    def num_rows(self) -> int:
        return self.matrix.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.matrix.numel() * self.matrix.element_size()

    def view(self, name: str) -> Tensor:
        """Returns the (num_rows, *shape) view of one parameter's entries; writing to it writes to the buffer."""
        return self.matrix[:, self._columns[name]].view(self.num_rows, *self._shapes[name])

    def flatten(self, vector: Iterable[Tensor]) -> Tensor:
        """Returns one vector, given by its tensors in the order of the parameters, as a row of this buffer: (P,)."""
        return torch.cat([tensor.reshape(-1).to(self.matrix.dtype) for tensor in vector]).to(self.matrix.device)

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Returns the parameters' pieces of flat vectors, (..., P): views, in the order of the parameters."""
        return flat.split([columns.stop - columns.start for columns in self._columns.values()], dim=-1)

    def sq_norms(self) -> Tensor:
        """Returns the square norm of each row, (num_rows,) fp64; within CHUNK columns the sum is in fp32."""
        squares = [part.square().sum(dim=1).double() for part in self.matrix.split(CHUNK, dim=1)]
        return torch.stack(squares).sum(dim=0).to(self._home)

    def dot(self, vectors: Tensor) -> Tensor:
        """Returns the inner products of the rows with several flat vectors, (q, P), as (num_rows, q) fp64.

        Within CHUNK columns the sum is in the precision of the buffer.
        """
        vectors = vectors.to(self.matrix.device)
        pairs = zip(self.matrix.split(CHUNK, dim=1), vectors.split(CHUNK, dim=1), strict=True)
        # Matrix times vector, one at a time: a product of matrices would be rounded to TF32 where that is switched on.
        products = [torch.stack([rows @ vector for vector in part], dim=1).double() for rows, part in pairs]
        return torch.stack(products).sum(dim=0).to(self._home)


def as_flat(tensor: Tensor) -> Tensor:
    """Returns the entries as a vector, in at least fp32."""
    flat = tensor.detach().reshape(-1)
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def flat_dot(a: Tensor, b: Tensor) -> Tensor:
    """Returns the inner product of two vectors, a scalar; in fp64 where there are more than CHUNK entries.

    An fp32 sum over the 2e8 entries of an embedding loses 2 % of a square norm; within a chunk, 1e-5.
    """
    if len(a) <= CHUNK:
        return torch.dot(a, b)
    return torch.stack([torch.dot(*parts) for parts in zip(a.split(CHUNK), b.split(CHUNK), strict=True)]).double().sum()


def sq_norm_in_metrics(gradient: Tensor, state: AdamWState | None) -> tuple[Tensor, Tensor]:
    """Returns |g|² and Σ P g², scalars: the square norm of a tensor, plain and in Adam's metric (nan without a state).

    Kept apart: in the hot path, stacking costs as much as measuring.
    """
    flat = as_flat(gradient)
    plain = flat_dot(flat, flat)
    return plain, flat_dot(state.precondition(flat), flat) if state is not None else plain.new_tensor(torch.nan)


def stack_sq_norms(sq_norms: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns what `sq_norm_in_metrics` said of several tensors as one fp64 tensor, (tensors, 2)."""
    return torch.stack([value for pair in sq_norms for value in pair]).double().view(-1, 2)


class GradientTap:
    """Catches each microbatch's gradient on its own scale, the mean over that microbatch: as a row, or as square norms.

    The trainer divides the loss by the number of microbatches K, so what a hook sees is 1/K of the microbatch's mean
    gradient; the tap undoes that here, once. The optimizer's gradient is then the mean of the rows (over ranks too).

    keep_rows      keep the gradients themselves: `buffer`, parameter-size rows, each the mean of some microbatches
    keep_sq_norms  keep their square norms only, measured as they stream by: `sq_norms`
    device         where the rows are kept, that of the parameters by default

    The hooks exist only between `arm` and `disarm`, which the driver puts around the trainer's own backward: a probe's
    own backward would fire them too.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        keep_rows: bool = True,
        keep_sq_norms: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self._parameters = parameters
        self._keep_rows = keep_rows
        self._device = device
        self._keep_sq_norms = keep_sq_norms
        self._scale = 1.0  # from what a hook sees to the mean scale
        self._row_of: Sequence[int] = ()  # by microbatch
        self.buffer: GradientBuffer | None = None
        self._rows: dict[str, tuple[Tensor, ...]] = {}  # views of the buffer, made once: the hooks are in the hot path
        self._squares: list[dict[str, tuple[Tensor, Tensor]]] = []  # by microbatch; the scale of the hooks
        self._states: Mapping[str, AdamWState] = {}
        self._handles: list[RemovableHandle] = []

    def start_step(
        self, row_of_microbatch: Sequence[int], num_rows: int, states: Mapping[str, object] | None = None
    ) -> None:
        """Empties what is kept, for the microbatches of the step that begins.

        row_of_microbatch  the row that each microbatch's gradient goes into; rows that none goes into stay zero
        states             AdamW's, for square norms in its metric; those that are not warm yet are nan
        """
        num_microbatches = len(row_of_microbatch)
        if self._keep_rows and (self.buffer is None or self.buffer.num_rows != num_rows):
            self.buffer = GradientBuffer(self._parameters, num_rows, self._device)
            self._rows = {name: self.buffer.view(name).unbind(0) for name in self._parameters}
        elif self.buffer is not None:
            self.buffer.matrix.zero_()
        self._squares = [{} for _ in range(num_microbatches)]
        self._states = {
            name: state for name, state in (states or {}).items() if isinstance(state, AdamWState) and state.is_warm
        }
        self._scale = float(num_microbatches)
        self._row_of = row_of_microbatch

    @property
    def sq_norms(self) -> Tensor | None:
        """|g_k|² and Σ P g_k² by microbatch and parameter, (K, parameters, 2), on the mean scale; None if not kept."""
        if not self._keep_sq_norms:
            return None
        zero = next(iter(self._parameters.values())).new_zeros(())
        unused = (zero, zero)  # a microbatch need not reach every parameter: an expert may get no token
        by_microbatch = [stack_sq_norms(squares.get(n, unused) for n in self._parameters) for squares in self._squares]
        return self._scale**2 * torch.stack(by_microbatch)

    def arm(self, microbatch: int) -> None:
        """Sets the hooks: gradients that reach the parameters from now on belong to this microbatch."""
        row = self._row_of[microbatch]
        share = self._scale / self._row_of.count(row)
        for name, param in self._parameters.items():
            if self._keep_rows:
                self._handles.append(param.register_hook(self._adder(self._rows[name][row], share)))
            if self._keep_sq_norms:
                self._handles.append(param.register_hook(self._measurer(name, self._squares[microbatch])))

    def disarm(self) -> None:
        """Takes the hooks away."""
        while self._handles:
            self._handles.pop().remove()

    def _adder(self, row: Tensor, share: float) -> Callable[[Tensor], None]:
        def add(grad: Tensor) -> None:
            row.add_(grad.to(row.device), alpha=share)

        return add

    def _measurer(self, name: str, squares: dict[str, tuple[Tensor, Tensor]]) -> Callable[[Tensor], None]:
        def measure(grad: Tensor) -> None:
            squares[name] = sq_norm_in_metrics(grad, self._states.get(name))

        return measure

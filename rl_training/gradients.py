"""Gradients kept beside training: a matrix of flat gradient vectors, and the leaf hooks that fill it.

`GradientBuffer` holds several vectors over the same named parameters as one matrix, so that an inner product with all
of them is one matrix product per parameter. `GradientTap` catches the gradient of each microbatch as autograd hands it
to the parameters. A hook on the leaf sees this rank's gradient of this microbatch alone — before DDP averages it and
before it is added to `.grad` — which differences of `.grad` do not give on the last microbatch under DDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rl_training.adamw import AdamWState

CHUNK = 2**20  # columns whose products are summed in fp32; beyond that, in fp64
JOINED = 2**18  # entries of small parameters that are handled together


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


class AdamMetric:
    """Adam's metric Σ P g², P that of the step before; nan for parameters without a warm state of AdamW's.

    The √P of parameters that are measured together is kept, one fp32 vector over them: every microbatch asks for it.
    """

    def __init__(self, states: Mapping[str, object] | None) -> None:
        self._states = {
            name: state for name, state in (states or {}).items() if isinstance(state, AdamWState) and state.is_warm
        }
        self._roots: dict[tuple[str, ...], Tensor] = {}

    def weigh(self, names: tuple[str, ...], flat: Tensor, sizes: Sequence[int]) -> Tensor:
        """Returns √P g of these parameters' gradients, which `flat` holds one after another."""
        root = self._roots.get(names)
        if root is None:
            states = [self._states.get(name) for name in names]
            root = join(
                state.preconditioner().sqrt_() if state is not None else flat.new_full((size,), torch.nan)
                for state, size in zip(states, sizes, strict=True)
            )
            if len(names) > 1:
                self._roots[names] = root
        return root * flat

    @property
    def num_bytes(self) -> int:
        return sum(root.numel() * root.element_size() for root in self._roots.values())


class SqNormMeter:
    """Measures |g|² and Σ P g² of gradients that stream by.

    In a hook the calls cost more than their work, so small gradients wait and are measured together, as one vector.
    """

    def __init__(self, metric: AdamMetric) -> None:
        self._metric = metric
        self._waiting: dict[str, Tensor] = {}
        self._num_waiting = 0  # entries
        self._measured: list[tuple[tuple[str, ...], Tensor]] = []  # names, (names, 2)

    def add(self, name: str, gradient: Tensor) -> None:
        """Measures this gradient, now or with the next ones."""
        if gradient.numel() >= JOINED:
            self._measure({name: gradient})
            return
        self._waiting[name] = gradient
        self._num_waiting += gradient.numel()
        if self._num_waiting >= JOINED:
            self.flush()

    def flush(self) -> None:
        """Measures the gradients that wait, and lets go of them."""
        if self._waiting:
            self._measure(self._waiting)
        self._waiting, self._num_waiting = {}, 0

    def result(self, names: Iterable[str]) -> Tensor:
        """Returns |g|² and Σ P g² by parameter, (parameters, 2) fp64; 0 for a parameter that got no gradient."""
        self.flush()
        rows = {name: row for of_names, table in self._measured for name, row in zip(of_names, table, strict=True)}
        # A microbatch need not reach every parameter: an expert may get no token.
        unused = self._measured[0][1].new_zeros(2)
        return torch.stack([rows.get(name, unused) for name in names])

    def _measure(self, gradients: Mapping[str, Tensor]) -> None:
        names, flat = tuple(gradients), as_flat(join(gradient.detach().reshape(-1) for gradient in gradients.values()))
        sizes = [gradient.numel() for gradient in gradients.values()]
        weighted = self._metric.weigh(names, flat, sizes)
        sq_norms = [_sq_norms(vector, sizes).double() for vector in (flat, weighted)]
        self._measured.append((names, torch.stack(sq_norms, dim=1)))


def _sq_norms(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns the square norms of the parts of a vector, (parts,)."""
    if len(sizes) == 1:
        return flat_dot(flat, flat).view(1)
    return torch.stack(torch._foreach_norm(flat.split(sizes))).square()


def join(vectors: Iterable[Tensor]) -> Tensor:
    """Returns the vectors as one, (n,); a single one is not copied."""
    parts = list(vectors)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
        self._metric = AdamMetric(None)
        self._meters: list[SqNormMeter] = []  # by microbatch; on the scale of the hooks
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
        self._metric = AdamMetric(states)
        self._meters = [SqNormMeter(self._metric) for _ in range(num_microbatches)]
        self._scale = float(num_microbatches)
        self._row_of = row_of_microbatch

    @property
    def sq_norms(self) -> Tensor | None:
        """|g_k|² and Σ P g_k² by microbatch and parameter, (K, parameters, 2), on the mean scale; None if not kept."""
        if not self._keep_sq_norms:
            return None
        return self._scale**2 * torch.stack([meter.result(self._parameters) for meter in self._meters])

    def end_step(self) -> None:
        """Lets go of the optimizer's states: under ZeRO they were gathered for this step."""
        self._meters, self._metric = [], AdamMetric(None)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept during a step."""
        return (self.buffer.num_bytes if self.buffer is not None else 0) + self._metric.num_bytes

    def arm(self, microbatch: int) -> None:
        """Sets the hooks: gradients that reach the parameters from now on belong to this microbatch."""
        row = self._row_of[microbatch]
        share = self._scale / self._row_of.count(row)
        for name, param in self._parameters.items():
            if self._keep_rows:
                self._handles.append(param.register_hook(self._adder(self._rows[name][row], share)))
            if self._keep_sq_norms:
                self._handles.append(param.register_hook(functools.partial(self._meters[microbatch].add, name)))

    def disarm(self) -> None:
        """Takes the hooks away."""
        while self._handles:
            self._handles.pop().remove()
        for meter in self._meters:
            meter.flush()

    def _adder(self, row: Tensor, share: float) -> Callable[[Tensor], None]:
        def add(grad: Tensor) -> None:
            row.add_(grad.to(row.device), alpha=share)

        return add

"""Gradients kept beside training: a matrix of flat gradient vectors, and the leaf hooks that fill it.

`GradientBuffer` holds several vectors over the same named parameters as one matrix, so that an inner product with all
of them is one matrix product per parameter. `GradientTap` catches the gradient of each microbatch as autograd hands it
to the parameters. A hook on the leaf sees this rank's gradient of this microbatch alone — before DDP averages it and
before it is added to `.grad` — which differences of `.grad` do not give on the last microbatch under DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

CHUNK = 2**20  # columns whose products are summed in fp32; beyond that, in fp64


class GradientBuffer:
    """`num_rows` vectors over the same named parameters: a (num_rows, P) matrix, at least fp32, all zero at first.

    Example: GradientBuffer({"w": torch.zeros(2, 3)}, num_rows=4).view("w").shape == (4, 2, 3)
    """

    def __init__(self, parameters: Mapping[str, Tensor], num_rows: int) -> None:
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
        self.matrix = torch.zeros(num_rows, start, dtype=dtype, device=first.device)

    @property
    def num_rows(self) -> int:
        return self.matrix.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.matrix.numel() * self.matrix.element_size()

    def view(self, name: str) -> Tensor:
        """Returns the (num_rows, *shape) view of one parameter's entries; writing to it writes to the buffer."""
        return self.matrix[:, self._columns[name]].view(self.num_rows, *self._shapes[name])

    def zero_(self) -> None:
        self.matrix.zero_()

    def flatten(self, vector: Iterable[Tensor]) -> Tensor:
        """Returns one vector, given by its tensors in the order of the parameters, as a row of this buffer: (P,)."""
        return torch.cat([tensor.reshape(-1).to(self.matrix.dtype) for tensor in vector])

    def sq_norms(self) -> Tensor:
        """Returns the square norm of each row, (num_rows,) in fp64."""
        return sum((part.square().sum(dim=1).double() for part in self.matrix.split(CHUNK, dim=1)), self._zeros())

    def dot(self, vector: Tensor) -> Tensor:
        """Returns the inner product of each row with a flat vector (P,), (num_rows,) in fp64."""
        parts = zip(self.matrix.split(CHUNK, dim=1), vector.split(CHUNK), strict=True)
        return sum(((rows @ part).double() for rows, part in parts), self._zeros())

    def _zeros(self) -> Tensor:
        return torch.zeros(self.num_rows, dtype=torch.float64, device=self.matrix.device)


class GradientTap:
    """Adds each microbatch's gradient to its own row of a buffer, on its own scale: the mean over that microbatch.

    The trainer divides the loss by the number of microbatches K, so what a hook sees is 1/K of the microbatch's mean
    gradient; the tap undoes that here, once. The optimizer's gradient is then the mean of the rows (over ranks too).

    The hooks also fire in a probe's own backward; they act only between `arm` and `disarm`, which the driver puts
    around the trainer's backward.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._row: int | None = None
        self._scale = 1.0
        self.buffer: GradientBuffer | None = None
        self._rows: dict[str, tuple[Tensor, ...]] = {}  # views of the buffer, made once: the hooks are in the hot path
        self._handles = [p.register_hook(self._hook(name)) for name, p in parameters.items()]

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def add(grad: Tensor) -> None:
            if self._row is not None:
                self._rows[name][self._row].add_(grad, alpha=self._scale)

        return add

    def start_step(self, num_microbatches: int) -> None:
        """Empties the buffer, with one row per microbatch of the step that begins."""
        if self.buffer is None or self.buffer.num_rows != num_microbatches:
            self.buffer = GradientBuffer(self._parameters, num_microbatches)
            self._rows = {name: self.buffer.view(name).unbind(0) for name in self._parameters}
        else:
            self.buffer.zero_()
        self._scale = float(num_microbatches)

    def arm(self, microbatch: int) -> None:
        self._row = microbatch

    def disarm(self) -> None:
        self._row = None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

"""Vectors over named parameters, and their inner products.

`FlatVectors` holds several of them as the rows of one matrix, so that an inner product with all of them is one
matrix product per parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

CHUNK = 2**20  # columns whose products are summed in fp32; beyond that, in fp64
JOINED = 2**18  # entries of small parameters that are handled together


class FlatVectors:
    """`num_rows` vectors over the same named parameters: a (num_rows, P) matrix, at least fp32, all zero at first.

    device   where it lies, that of the parameters by default; on another one, "cpu", every product goes through there

    >>> FlatVectors({"w": torch.zeros(2, 3)}, num_rows=4).view("w").shape
    torch.Size([4, 2, 3])
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
        self.home = first.device  # of the parameters: where products are answered
        self.matrix = torch.zeros(num_rows, start, dtype=dtype, device=device or first.device)

    @property
    def num_rows(self) -> int:
        return self.matrix.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.matrix.numel() * self.matrix.element_size()

    def view(self, name: str) -> Tensor:
        """Returns the (num_rows, *shape) view of one parameter's entries; writing to it writes to the matrix."""
        return self.matrix[:, self._columns[name]].view(self.num_rows, *self._shapes[name])

    def flatten(self, vector: Iterable[Tensor]) -> Tensor:
        """Returns one vector, given by its tensors in the order of the parameters, as a row of the matrix: (P,)."""
        return torch.cat([tensor.reshape(-1).to(self.matrix.dtype) for tensor in vector]).to(self.matrix.device)

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Returns the parameters' pieces of flat vectors, (..., P): views, in the order of the parameters."""
        return flat.split([columns.stop - columns.start for columns in self._columns.values()], dim=-1)

    def sq_norms(self) -> Tensor:
        """Returns the square norm of each row, (num_rows,) fp64; within CHUNK columns the sum is in fp32."""
        squares = [part.square().sum(dim=1).double() for part in self.matrix.split(CHUNK, dim=1)]
        return torch.stack(squares).sum(dim=0).to(self.home)

    def dot(self, vectors: Tensor) -> Tensor:
        """Returns the inner products of the rows with several flat vectors, (q, P), as (num_rows, q) fp64.

        Within CHUNK columns the sum is in the precision of the matrix.
        """
        vectors = vectors.to(self.matrix.device)
        pairs = zip(self.matrix.split(CHUNK, dim=1), vectors.split(CHUNK, dim=1), strict=True)
        # Matrix times vector, one at a time: a product of matrices would be rounded to TF32 where that is switched on.
        products = [torch.stack([rows @ vector for vector in part], dim=1).double() for rows, part in pairs]
        return torch.stack(products).sum(dim=0).to(self.home)


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


def join(vectors: Iterable[Tensor]) -> Tensor:
    """Returns the vectors as one, (n,); a single one is not copied."""
    parts = list(vectors)
    return parts[0] if len(parts) == 1 else torch.cat(parts)

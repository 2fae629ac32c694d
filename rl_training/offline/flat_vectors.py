"""Vectors over all trainable parameters as the rows of one matrix: kernels multiply matrices of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class FlatVectors:
    """`num_rows` vectors over the same named parameters: a (num_rows, P) matrix, at least fp32, all zero at first.

    The parameters follow one another as in a Layout (mathematics/vectors.py). `device` is theirs by default.

    >>> FlatVectors({"w": torch.zeros(2, 3)}, num_rows=4).view("w").shape
    torch.Size([4, 2, 3])
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], num_rows: int, device: torch.device | str | None = None
    ) -> None:
        first = next(iter(parameters.values()))
        self._shapes = {name: p.shape for name, p in parameters.items()}
        ends = [0, *itertools.accumulate(p.numel() for p in parameters.values())]
        self._columns = {name: slice(*pair) for name, pair in zip(parameters, itertools.pairwise(ends), strict=True)}
        dtype = torch.promote_types(first.dtype, torch.float32)
        self.matrix = torch.zeros(num_rows, ends[-1], dtype=dtype, device=device or first.device)

    @property
    def num_rows(self) -> int:
        return self.matrix.shape[0]

    def view(self, name: str) -> Tensor:
        """Returns the (num_rows, *shape) view of one parameter's entries; writing to it writes to the matrix."""
        return self.matrix[:, self._columns[name]].view(self.num_rows, *self._shapes[name])

    def flatten(self, vector: Iterable[Tensor]) -> Tensor:
        """Returns one vector, given by its tensors in the order of the parameters, as a row of the matrix: (P,)."""
        return torch.cat([tensor.reshape(-1).to(self.matrix.dtype) for tensor in vector]).to(self.matrix.device)

"""Square norms of gradients that stream by, plain and in Adam's metric: |g|² and Σ P g²."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.vectors import JOINED, as_flat, flat_dot, join


class AdamMetric:
    """Adam's metric Σ P g², P that of the step before; nan for parameters without a warm state of AdamW's.

    The √P of parameters that are measured together is kept as one fp32 vector, for every microbatch.
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
                [
                    state.preconditioner().sqrt_() if state is not None else flat.new_full((size,), torch.nan)
                    for state, size in zip(states, sizes, strict=True)
                ]
            )
            if len(names) > 1:
                self._roots[names] = root
        return root * flat

    @property
    def num_bytes(self) -> int:
        return sum(root.numel() * root.element_size() for root in self._roots.values())


class SqNormMeter:
    """Measures |g|² and Σ P g² of gradients that stream by.

    In a hook, calls cost more than their work, so small gradients wait and are measured together, as one vector.
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
        """Measures the gradients that wait, and frees them."""
        if self._waiting:
            self._measure(self._waiting)
        self._waiting, self._num_waiting = {}, 0

    def result(self, names: Iterable[str]) -> Tensor:
        """Returns |g|² and Σ P g² by parameter, (parameters, 2) fp64; 0 for a parameter that got no gradient."""
        self.flush()
        rows = {
            name: row for names_of_rows, table in self._measured for name, row in zip(names_of_rows, table, strict=True)
        }
        # A microbatch need not reach every parameter: an expert may get no token.
        unused = self._measured[0][1].new_zeros(2)
        return torch.stack([rows.get(name, unused) for name in names])

    def _measure(self, gradients: Mapping[str, Tensor]) -> None:
        names, flat = (
            tuple(gradients),
            as_flat(join([gradient.detach().reshape(-1) for gradient in gradients.values()])),
        )
        sizes = [gradient.numel() for gradient in gradients.values()]
        weighted = self._metric.weigh(names, flat, sizes)
        sq_norms = [_sq_norms(vector, sizes).double() for vector in (flat, weighted)]
        self._measured.append((names, torch.stack(sq_norms, dim=1)))


def _sq_norms(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns the square norms of the parts of a vector, (parts,)."""
    if len(sizes) == 1:
        return flat_dot(flat, flat).view(1)
    return torch.stack(torch._foreach_norm(flat.split(sizes))).square()

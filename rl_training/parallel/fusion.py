"""Run a function of vectors operation by operation, or compiled into one pass over everything that it reads.

An optimizer's step, its products with an entropy gradient and their sums are elementwise. Operation by operation, each
of a dozen operations reads and writes whole vectors. `torch.compile` makes one kernel of the same source, for a GPU as
for a CPU, which reads each vector once and writes only sums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_training.parallel.sums import ODD_BLOCK, common_block, inner_product, sums_of_blocks, sums_of_spans

logger = logging.getLogger(__name__)

BLOCK = ODD_BLOCK  # entries that a compiled function sums in the vectors' own precision
TOLERANCE = 1e-3  # relative to the norm: largest distance of a compiled function's results from those without compiler
MAX_GRAPHS = 64  # of all functions together: for kinds of optimizer state, first steps and dtypes
NOT_COMPILED = "probes run their passes over vectors uncompiled, which takes longer and changes no result: {reason}"
OTHER_RESULT = "compiled, {name} gives other results, by {distance:.1g} of their norm"
OPTIONS: dict[str, Any] = {
    # Values are used more than once within a kernel. Without these, some would be written to memory in between.
    "realize_reads_threshold": 64,
    "realize_acc_reads_threshold": 64,
    "realize_opcount_threshold": 1024,
    # Rounding to bf16 is part of some steps.
    "emulate_precision_casts": True,
}


class Product(NamedTuple):
    """An elementwise product, factor · left · right, of which sums are needed rather than entries."""

    factor: float
    left: Tensor
    right: Tensor


Products = Callable[..., Iterable[Product]]


class Fusion:
    """Runs functions of vectors.

    At calls 1, 2, 4, 8, … of each, compiled results are compared with uncompiled ones, because a compiler may take a
    number that changes for a constant.

    Where the compiler is missing or fails, functions run uncompiled from then on, and one line says so.

    Args:
        is_on: Whether functions are compiled.
        backend: The compiler of `torch.compile`.
    """

    def __init__(self, is_on: bool = False, backend: str = "inductor") -> None:
        self.is_on = is_on
        self._backend = backend
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._calls = Counter[Callable[..., Any]]()

    def sums(self, products: Products, sizes: Sequence[int], *arguments: Any, is_rough: bool = False) -> Tensor:
        """Return the sums of products over consecutive spans, (products, …, spans) fp64.

        Args:
            products: Yields the products of its arguments. It is elementwise.
            sizes: The length of each span.
            *arguments: Tensors, (n,), or (…, n) if functions are not compiled; 0-dimensional tensors; dataclasses that
                have tensors, (n,).
            is_rough: A relative precision of about 1e-5 is enough for sums over one long span.
        """
        if self.is_on and all(size % BLOCK == 0 for size in sizes):
            blocks = self._run(products, _block_sums, BLOCK, products, *arguments)
            if blocks is not None:
                return sums_of_blocks(blocks, tuple(size // BLOCK for size in sizes))
        return uncompiled_sums(products(*arguments), tuple(sizes), is_rough)

    def entries(self, function: Callable[..., Any], block: int, length: int, *arguments: Any) -> Any:
        """Return what `function` makes of its vectors, each as (blocks, block); None if it is not compiled.

        Args:
            function: The function.
            block: The length of a block.
            length: The number of entries. If it is not a multiple of `block`, the function is not compiled.
            *arguments: As for `sums`.
        """
        return self._run(function, function, block, *arguments) if self.is_on and length % block == 0 else None

    def _run(self, key: Callable[..., Any], function: Callable[..., Any], block: int, *arguments: Any) -> Any:
        """Return the results of a compiled function, or None if it cannot be compiled.

        Args:
            key: The function whose calls are counted, and which a warning names.
            function: The function to compile, of `key` or `key` itself.
            block: The length of a block.
            *arguments: As for `sums`.
        """
        values = [in_blocks(value, block) for value in arguments]
        try:
            self._calls[key] += 1
            with _one_graph_for_all_sizes():
                results = self._compiler(function)(*values)
            if self._calls[key] & (self._calls[key] - 1) == 0:
                _check(results, function(*values), key.__name__)
            return results
        except Exception as error:
            self.is_on = False
            lines = str(error).split("\n")[:2] or [type(error).__name__]  # the compiler's name, and what it says
            logger.warning(NOT_COMPILED.format(reason=" ".join(lines)))
            return None

    def _compiler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if function not in self._compiled:
            options = OPTIONS if self._backend == "inductor" else None
            self._compiled[function] = torch.compile(
                function, fullgraph=True, dynamic=True, backend=self._backend, options=options
            )
        return self._compiled[function]


def _check(results: Any, expected: Any, name: str) -> None:
    """Raise ValueError if results differ from the expected ones, each a tensor or several."""
    for result, exact in zip(_tensors(results), _tensors(expected), strict=True):
        distance = float((result - exact.to(result)).double().norm() / exact.double().norm().clamp(min=1e-300))
        if distance > TOLERANCE:
            raise ValueError(OTHER_RESULT.format(name=name, distance=distance))


@contextlib.contextmanager
def _one_graph_for_all_sizes() -> Iterator[None]:
    """Compile for all sizes, also for vectors that happen to have equal sizes at first."""
    with (
        torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS),
    ):
        yield


def plus(total: Tensor, values: Tensor, factor: float) -> Tensor:
    """Return total + factor · values: torch.add, whose alpha a compiler would keep from the first step."""
    is_compiling = torch.compiler.is_compiling()
    return total + factor * values if is_compiling else torch.add(total, values, alpha=factor)


def plus_product(total: Tensor, a: Tensor, b: Tensor, factor: float) -> Tensor:
    """Return total + factor · a · b: torch.addcmul, for the same reason."""
    is_compiling = torch.compiler.is_compiling()
    return total + factor * (a * b) if is_compiling else torch.addcmul(total, a, b, value=factor)


def plus_quotient(total: Tensor, a: Tensor, b: Tensor, factor: float) -> Tensor:
    """Return total + factor · a / b: torch.addcdiv, for the same reason."""
    is_compiling = torch.compiler.is_compiling()
    return total + factor * (a / b) if is_compiling else torch.addcdiv(total, a, b, value=factor)


def in_blocks(value: Any, block: int) -> Any:
    """Return a vector, or a dataclass that has vectors, with each vector as (blocks, block). Nothing is copied."""
    if isinstance(value, Tensor):
        if value.dim() != 1:
            return value
        blocks = value.view(-1, block).data  # not a view, whose base would be a part of what is compiled
        torch._dynamo.mark_static(blocks, 1)
        return blocks
    if isinstance(value, tuple):
        parts = [in_blocks(part, block) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [
            name for name, part in vars(value).items() if isinstance(part, Tensor) or dataclasses.is_dataclass(part)
        ]
        return dataclasses.replace(value, **{name: in_blocks(getattr(value, name), block) for name in names})
    return value


def _block_sums(products: Products, *arguments: Any) -> Tensor:
    """Return the sums of products over the last dimension, (products, blocks)."""
    return torch.stack([(left * right).sum(dim=-1).mul(factor) for factor, left, right in products(*arguments)])


def uncompiled_sums(products: Iterable[Product], sizes: tuple[int, ...], is_rough: bool = False) -> Tensor:
    """Return the sums of products over spans, (products, …, spans) fp64. Blocks of all products are summed at once."""
    block = common_block(sizes)
    factors = list[float]()
    parts = list[Tensor]()
    for factor, left, right in products:
        factors.append(factor)
        if factor == 0.0:
            parts.append(left.new_zeros(sum(sizes) // block if block else len(sizes)))
        elif len(sizes) == left.dim() == right.dim() == 1:
            parts.append((torch.dot if is_rough else inner_product)(left, right).unsqueeze(0))
        elif block:
            parts.append((left * right).unflatten(-1, (-1, block)).sum(dim=-1))
        else:
            parts.append(sums_of_spans(left * right, sizes))
    table = torch.stack(torch.broadcast_tensors(*parts))
    sums = sums_of_blocks(table, tuple(size // block for size in sizes)) if block else table.double()
    torch._foreach_mul_([*sums.unbind()], factors)
    return sums


def _tensors(results: Any) -> Iterable[Tensor]:
    return (results,) if isinstance(results, Tensor) else results

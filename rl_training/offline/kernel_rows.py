"""The rows of a kernel: scaled by √M for the products, and summarized for the file."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from rl_training.mathematics.sketches import CountSketches
from rl_training.offline.gradient_rows import GradientRows
from rl_training.offline.kernel_blocks import row_products, square_norms, weighted_sum
from rl_training.offline.kernel_types import KernelInputs, KernelSettings, KernelStep, Ranks

NORM_BUCKETS = 2**13  # of each of two sketches: the norm of a sum is right to 0.6 % (one standard error)


class RowSummarizer:
    """Keeps of every sequence's gradient its sketches, its norm, and what the step does to it."""

    def __init__(self, rows: GradientRows, step: KernelStep, settings: KernelSettings) -> None:
        sizes = {name: p.numel() for name, p in rows.parameters.items()}
        self._step = step
        self._sketch = CountSketches(sizes, settings.sketch_buckets, settings.sketch_repeats, settings.sketch_seed)
        self._sketch_of_norms = CountSketches(sizes, NORM_BUCKETS, repeats=2, seed=settings.sketch_seed)

    def sketch_for_norms(self, own: Tensor) -> Tensor:
        """Returns sketches of the unscaled rows W, (n, 2, NORM_BUCKETS), from which norms of their sums follow."""
        return self._sketch_of_norms(own)

    def scale(self, own: Tensor) -> dict[str, Tensor]:
        """Makes √M W of the rows W, (n, P), in place, and returns what is kept of them.

        sketches  of √M W                 sq_norms  |√M W|², (n,)                products  W·δθ by cause, (n, 3)
        """
        products = row_products(own, self._step.update)
        own *= self._step.root
        return {"sketches": self._sketch(own), "sq_norms": square_norms(own), "products": products}

    def scale_entropy(self, own: Tensor) -> dict[str, Tensor]:
        """Makes √M x of the rows x, (n, P), in place, and returns x·δθ by cause and |√M x|²."""
        products = row_products(own, self._step.update)
        own *= self._step.root
        return {"entropy_products": products, "entropy_sq_norms": square_norms(own)}


def expectation(
    rows: GradientRows, inputs: KernelInputs, summarizer: RowSummarizer, blocks: list[range], ranks: Ranks
) -> str:
    """Returns a line on the size and the expected time, by the cost formula of kernel_blocks.py.

    Each of its terms is timed on one microbatch.
    """
    of_u, of_e = (rows.batches(range(r.num_sequences))[0] for r in (inputs.update, inputs.evaluation))
    both = rows.both(inputs.evaluation, of_e, inputs.logp_weights, inputs.entropy_weights)
    holding = _seconds(lambda: [summarizer.scale_entropy(part) for part in both])
    own: list[Tensor] = []
    streaming = _seconds(lambda: own.append(rows.log_probability(inputs.update, of_u)))
    streaming += _seconds(lambda: weighted_sum(inputs.update.advantages[of_u], own[0]))
    keeping = _seconds(lambda: summarizer.scale(own[0]))
    a, b = (torch.ones(count, 2**16, device=own[0].device) for count in (len(blocks[0]), 32))
    row_products(a, b)
    multiplying = _seconds(lambda: row_products(a, b)) / (len(a) * len(b) * a.shape[1])
    num_held, num_streamed = inputs.evaluation.num_sequences, inputs.update.num_sequences
    num_parameters, held = own[0].shape[1], num_held / ranks.count
    seconds = num_streamed * -(-len(blocks) // ranks.count) * streaming / len(of_u) + held * holding / len(of_e)
    seconds += (num_streamed + held) * keeping / len(of_u) + 2 * held * num_streamed * num_parameters * multiplying
    return (
        f"kernel: {num_held} × {num_streamed} sequences, {num_parameters:,} parameters, "
        f"{len(blocks)} block{'s' * (len(blocks) > 1)} of {len(blocks[0])} rows; about {seconds:.0f} s"
    )


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started

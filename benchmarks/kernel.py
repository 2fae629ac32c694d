"""What the kernel of sequences costs, as Markdown: its parts as ratios of interleaved runs, the whole and the formula.

    OMP_NUM_THREADS=1 python benchmarks/kernel.py                                  # the default task
    OMP_NUM_THREADS=1 python benchmarks/kernel.py --shape hidden512 --rank 16 --microbatch 16

`gradients` is the speed of gradients sequence by sequence, as a share of that of a plain forward and backward over the
same batch; `both` that with a second backward, for W and x. `product` is the speed of the kernel's product as a share
of one plain fp32 product of that size. All by processor time, which other jobs disturb less (on a GPU: the clock), each
the median over pairs of runs that follow one another.

`whole` calculates a kernel of random sequences, and holds its time against the formula of offline/kernel_blocks.py,
with t, s and F as measured just before and after. `--sizes` prints what the formula says of other sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from workload import SHAPES, Workload, make_trainer

from rl_training.engine.batch import Rollout
from rl_training.engine.optimizer import view_optimizer
from rl_training.engine.updates import optimizer_pieces
from rl_training.hosts.trl.sharding import replicated
from rl_training.mathematics.sketches import CountSketches
from rl_training.mathematics.vectors import Layout
from rl_training.offline.gradient_rows import GradientRows
from rl_training.offline.kernel import calculate_kernel
from rl_training.offline.kernel_blocks import KernelInputs, RowSummarizer, plan_blocks, row_products
from rl_training.offline.kernel_files import load_kernel
from rl_training.offline.settings import KernelSettings
from rl_training.offline.update import Update, in_parts

PAIRS = 7


def clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def seconds(work: Callable[[], object]) -> float:
    start = clock()
    work()
    return clock() - start


def interleaved(plain: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Returns the median of plain's seconds, and of the ratio plain / other, over pairs that follow one another."""
    plain(), other()
    pairs = [(seconds(plain), seconds(other)) for _ in range(PAIRS)]
    return statistics.median(a for a, _ in pairs), statistics.median(a / b for a, b in pairs)


def random_rollout(count: int, prompt: int, completion: int, vocabulary: int, device: torch.device) -> Rollout:
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(3, vocabulary, (count, prompt + completion), generator=generator).to(device)
    mask = torch.ones_like(ids)
    advantages = torch.randn(count, generator=generator).to(device)
    number = torch.arange(count, device=device)
    return Rollout(
        ids[:, :prompt], mask[:, :prompt], ids[:, prompt:], mask[:, prompt:], advantages, None, number, None, True
    )


def inputs_of(rows: GradientRows, trainer: object, e: Rollout, u: Rollout, max_length: int) -> KernelInputs:
    """Returns those of a first step, whose moments are zero: its numbers mean nothing, its costs do."""
    view = view_optimizer(replicated(trainer), dict(rows.parameters))  # type: ignore[arg-type]
    weights = torch.randn(e.completion_mask.shape, device=e.advantages.device)
    pairs = weights / e.num_sequences, torch.ones_like(weights) / e.num_sequences
    of_u = -(u.advantages / (u.num_sequences * max_length)).unsqueeze(1) * u.completion_mask
    gradient = torch.stack([rows.sum(u, batch, of_u) for batch in rows.batches(range(u.num_sequences))]).sum(dim=0)
    x = torch.stack([rows.sum(e, batch, *pairs) for batch in rows.batches(range(e.num_sequences))]).sum(dim=0)
    pieces = optimizer_pieces(Layout(rows.parameters), rows.parameters, view.states)
    parts, clip = in_parts(pieces, gradient, math.inf)
    step = Update(gradient, clip, parts, parts.total, pieces, gradient[None], (0,), torch.ones(1), math.inf)
    return KernelInputs(e, weights, torch.ones_like(weights), x, u, step, max_length)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="default_task", choices=["default_task", *SHAPES])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--microbatch", type=int, default=32)
    parser.add_argument("--evaluation", type=int, default=64, help="N_E of `whole`")
    parser.add_argument("--update", type=int, default=128, help="N_U of `whole`")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--completion-tokens", type=int, default=36)
    parser.add_argument("--memory-gb", type=float, default=4.0)
    parser.add_argument("--sizes", action="store_true")
    return parser.parse_args()


def print_gradients(rows: GradientRows, inputs: KernelInputs, batch: Any, microbatch: int) -> None:
    """Prints how fast the gradients of single sequences come, beside a plain forward and backward."""
    e, u, weights = inputs.evaluation, inputs.update, inputs.logp_weights
    plain_seconds, gradients = interleaved(
        lambda: rows.sum(u, batch, torch.ones_like(weights[:1]).expand(len(batch), -1)),
        lambda: rows.log_probability(u, batch),
    )
    _, both = interleaved(
        lambda: rows.sum(e, batch[: len(e.advantages)], weights),
        lambda: list(rows.both(e, batch[: len(e.advantages)], inputs.logp_weights, inputs.entropy_weights)),
    )
    print("| what | figure |\n|---|---|")
    print(f"| plain forward and backward, sequences/s | {microbatch / plain_seconds:.0f} |")
    print(f"| gradients, share of that speed | {gradients:.2f} |")
    print(f"| both W and x, share of that speed | {both:.2f} |")


def print_sizes(sketch_seconds: float, rate: float) -> None:
    print("\n| N_E × N_U × parameters | held, GB | products, s | sketches, s |\n|---|---|---|---|")
    for parameters_of in (18_464_768, 90_000_000):
        held_gb, sketching = 128 * 2 * 4 * parameters_of / 1e9, sketch_seconds * parameters_of * 384
        products, sizes = 4 * 128 * 256 * parameters_of / rate, f"128 × 256 × {parameters_of:,}"
        print(f"| {sizes} | {held_gb:.1f} | {products:.0f} | {sketching:.0f} |")


def print_whole(
    args: argparse.Namespace, rows: GradientRows, inputs: KernelInputs, parameters: Mapping[str, Any]
) -> tuple[float, float]:
    """Prints what a whole kernel takes, and what the formula says; returns a sketch's seconds a coordinate, and F."""
    size = sum(p.numel() for p in parameters.values())
    device = inputs.logp_weights.device
    batch = rows.batches(range(args.microbatch))[0]
    held, streamed = (
        torch.randn(args.evaluation, size, device=device),
        torch.randn(args.microbatch, size, device=device),
    )
    product_seconds, product = interleaved(lambda: held @ streamed.T, lambda: row_products(held, streamed))
    sketch = CountSketches({name: p.numel() for name, p in parameters.items()})
    sketch_seconds = min(seconds(lambda: sketch(streamed)) for _ in range(3)) / streamed.numel()
    settings = KernelSettings(args.memory_gb, microbatch_size=args.microbatch)
    summarizer = RowSummarizer(inputs, rows.parameters, settings)

    def rates() -> tuple[float, float, float]:
        """Returns t, s and F of the formula."""
        products = seconds(lambda: row_products(held, streamed)) / (2.0 * held.shape[0] * streamed.numel())
        own = seconds(lambda: rows.log_probability(inputs.update, batch))
        return own / len(batch), seconds(lambda: summarizer.scale(streamed)) / len(streamed), 1.0 / products

    before = [rates() for _ in range(3)]
    print(f"| product, share of a plain one of {args.evaluation} × {size} × {args.microbatch} | {product:.2f} |")
    own_rate = statistics.median(rate for _, _, rate in before)
    plain_rate = 2.0 * args.evaluation * size * args.microbatch / product_seconds
    print(f"| product, GFLOP/s | {own_rate / 1e9:.0f} (plain {plain_rate / 1e9:.0f}) |")
    print(f"| sketches, ns per coordinate | {1e9 * sketch_seconds:.0f} |")

    e, u = args.evaluation, args.update
    num_blocks = len(plan_blocks(e, size, memory_bytes=1e9 * args.memory_gb, microbatch=args.microbatch))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        took = seconds(lambda: calculate_kernel(rows, inputs, settings, Path(folder)))
        error = float(load_kernel(Path(folder)).about["identity_error"])
    per_sequence, kept, rate = (statistics.median(x) for x in zip(*before, *(rates() for _ in range(3)), strict=True))
    passes = u * num_blocks + 1.6 * e  # the first pass over U is the analysis's own
    told = passes * per_sequence + (e + u) * kept + 4 * e * u * size / rate
    told += args.microbatch * (2.6 * per_sequence + kept)  # timed beforehand, for what is said of the time left
    print(f"| kept of a sequence, ms (t: {1e3 * per_sequence:.1f}) | {1e3 * kept:.1f} |")
    print(f"| whole, {e} × {u}, blocks: {num_blocks}, s | {took:.1f} |")
    print(f"| the formula, s | {told:.1f} ({took / told:.2f}) |")
    print(f"| error of the identity | {error:.1g} |")
    return sketch_seconds, rate


def main() -> None:
    args = arguments()
    trainer = make_trainer(Workload(args.shape, args.rank, completion_tokens=args.completion_tokens), [], 1)
    trainer.create_optimizer_and_scheduler(1)
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    size = sum(p.numel() for p in parameters.values())
    device, vocabulary = next(iter(parameters.values())).device, trainer.model.config.vocab_size
    rows = GradientRows(trainer, parameters, args.microbatch)
    e, u = (random_rollout(n, args.prompt_tokens, args.completion_tokens, vocabulary, device)
            for n in (args.evaluation, args.update))  # fmt: skip
    inputs = inputs_of(rows, trainer, e, u, args.completion_tokens)
    tokens = f"{args.prompt_tokens} + {args.completion_tokens} tokens"
    print(f"{args.shape}, LoRA rank {args.rank}, {size:,} trained, {tokens}\n")
    print_gradients(rows, inputs, rows.batches(range(args.microbatch))[0], args.microbatch)
    sketch_seconds, rate = print_whole(args, rows, inputs, parameters)
    if args.sizes:
        print_sizes(sketch_seconds, rate)


if __name__ == "__main__":
    main()

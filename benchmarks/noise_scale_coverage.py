"""Does the interval of the noise scale hold the true one? Drawn gradients of known mean and covariance.

    OMP_NUM_THREADS=1 python benchmarks/noise_scale_coverage.py [--runs 1000] [--steps 40 150]

Each run is so many steps of 8 blocks of 4 prompts, averaged as the probe `gns` does. The covariance is diagonal, of 50
entries that fall as k^-power; prompts' gradients are normal, or 0 for 70 % of the prompts and normal for the others.
The mean gradient points evenly along all entries, as long as the wanted noise scale says; ∞ is no mean gradient at all.
Coverage is of the nominal 95 % interval (Fieller's); unbounded are intervals without an upper end. Beside it, of the
naive interval: ratio ± Student-t times its jackknife error, which is no interval where the ratio is not above 0.
"""

from __future__ import annotations

import argparse
import math

import rl_training.job.silence  # noqa: F401

import torch
from scipy.stats import t as student
from tqdm import tqdm

from rl_training.mathematics.noise_scale import (
    average,
    noise_moments,
    noise_scale_interval,
    signal_to_noise_interval,
)

BLOCKS, BLOCK, DIM, DECAY = 8, 4, 50, 0.95


def history(steps: int, power: float, scale: float, sparse: bool, generator: torch.Generator) -> torch.Tensor:
    """Returns (steps, 2): tr Σ^ and |G|²^ of each step, where tr Σ = 1."""
    variances = torch.arange(1, DIM + 1, dtype=torch.float64) ** -power
    variances /= variances.sum()
    gradients = torch.randn(steps, BLOCKS, BLOCK, DIM, generator=generator, dtype=torch.float64) * variances.sqrt()
    if sparse:
        kept = torch.rand(steps, BLOCKS, BLOCK, 1, generator=generator, dtype=torch.float64) < 0.3
        gradients *= kept / math.sqrt(0.3)
    blocks = gradients.mean(dim=2) + math.sqrt(1.0 / scale / DIM)
    squares = blocks.square().sum(dim=2).mean(dim=1), blocks.mean(dim=1).square().sum(dim=1)
    return noise_moments(*squares, block_size=BLOCK, batch_size=BLOCKS * BLOCK)


def row(runs: int, steps: int, power: float, scale: float, sparse: bool) -> str:
    generator = torch.Generator().manual_seed(0)
    hits = unbounded = naive = defined = 0
    for _ in range(runs):
        averages = average(history(steps, power, scale, sparse, generator), DECAY)
        interval = signal_to_noise_interval(averages)
        hits += interval[0] <= 1.0 / scale <= interval[1]
        unbounded += math.isinf(noise_scale_interval(interval)[1])
        ratio = averages.signal_to_noise
        defined += ratio > 0
        error = student.ppf(0.975, averages.steps - 1) * averages.signal_to_noise_stderr / ratio**2
        naive += ratio > 0 and abs(1.0 / ratio - scale) <= error
    cells = [f"k^-{power:g}", "sparse" if sparse else "normal", f"{scale:g}".replace("inf", "∞"), str(steps)]
    shares = [hits, unbounded, defined, naive]
    return f"| {' | '.join(cells + [f'{count / runs:.3f}' for count in shares])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, nargs="+", default=[40, 150])
    options = parser.parse_args()
    print("| spectrum | prompts | noise scale | steps | coverage | unbounded | ratio above 0 | naive bar holds it |")
    print("|---|---|---|---|---|---|---|---|")
    cases = [
        (steps, power, scale, sparse)
        for power in (0.0, 1.5, 3.0)
        for scale in (24.0, 200.0, math.inf)
        for steps in options.steps
        for sparse in (False, True)
    ]
    for case in tqdm(cases, unit="row"):
        tqdm.write(row(options.runs, *case))


if __name__ == "__main__":
    main()

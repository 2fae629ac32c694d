"""Single steps of real runs: how far predictions are from the truth, by how X is drawn, and whether bars hold.

    OMP_NUM_THREADS=1 python benchmarks/along_run.py [--seeds 0 1 2 3] [--steps 40] [--fresh 256] [--save FILE]

The default task is trained with several probes `simple` at once, which see the same batches and differ in the responses
that X is computed from. At every step a fresh sample, one response each to `--fresh` random prompts, gives the truth
along the same directions: X(θ) · δθ, with the baseline over all other responses of the sample and the derivative as a
central difference of two forwards. The truth's own error is added to the bars.

    noise      root mean square of (estimate − truth), less the truth's own error
    coverage   of nominal 95 % intervals, with the bar of the batch alone and with the variance averaged over steps
    width      of the latter over that of the former, on average
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from default_task import default_trainer
from scipy.stats import t as student
from torch import Tensor
from tqdm import tqdm
from transformers import TrainerCallback

from rl_training import Estimate, Probe
from rl_training.mathematics.calibration import interval_covers
from rl_training.mathematics.entropy import surrogate_weights
from rl_training.mathematics.running_variance import RunningVariance
from rl_training.probes import SimpleEntropyProbe
from rl_training.probes.base import Need
from rl_training.step.types import StepContext

CHOICES: dict[str, dict[str, Any]] = {
    "first, 1/8": {},
    "norm, 1/32": {"draw": "norm", "prompt_share": 0.25},
    "norm, 1/16": {"draw": "norm", "prompt_share": 0.5},
    "norm, 1/8": {"draw": "norm"},
    "norm, 2/8": {"draw": "norm", "responses_per_prompt": 2},
    "all, 8/8": {"responses_per_prompt": 8},
}
QUANTITIES = ("forward", "backward", "trapezoid", "cumulative_predicted")
DIFFERENCE = 0.25  # of the step: the central difference moves this far both ways
DEGREES = 7  # of a bar from 8 folds
T_7 = float(student.ppf(0.975, DEGREES))
DECAYS = (0.5, 0.8)


class AlongRun(Probe):
    """Asks the probes of CHOICES at every step, and the truth of a fresh sample."""

    name = "along_run"
    needs = Need.FOLD_GRADIENTS

    def __init__(self, choices: Sequence[str], num_fresh: int, seed: int) -> None:
        super().__init__()
        self._num_fresh, self._seed = num_fresh, seed
        self._probes = {name: SimpleEntropyProbe(seed=seed, error_decay=0.0, **CHOICES[name]) for name in choices}
        self._last: dict[str, Tensor] | None = None  # δθ of the step before
        self.truth: list[list[float]] = []  # of each step: forward, its error, backward, its error
        self.said: list[dict[str, dict[str, tuple[float, float]]]] = []

    def on_pre_optimizer_step(self, ctx: StepContext) -> None:
        for probe in self._probes.values():
            probe.on_pre_optimizer_step(ctx)
        self._old = {name: p.detach().clone() for name, p in ctx.parameters.items()}
        self._fresh = ctx.policy.sample(self._num_fresh, (self._seed << 32) + ctx.step)
        scores = ctx.policy.score_rollout(self._fresh)
        one_group = torch.zeros(self._num_fresh, dtype=torch.long)
        self._weights = surrogate_weights(scores.logps, scores.entropies, scores.mask, one_group, target="token")
        self._backward = (
            [float("nan")] * 2
            if self._last is None
            else self._slope(ctx, {n: DIFFERENCE * d for n, d in self._last.items()}, dict.fromkeys(self._last, 0.0))
        )

    def on_optimizer_step(self, ctx: StepContext) -> None:
        for probe in self._probes.values():
            probe.on_optimizer_step(ctx)
        self._last = {name: p.detach() - self._old[name] for name, p in ctx.parameters.items()}
        back = {name: -step for name, step in self._last.items()}
        forward = self._slope(ctx, {n: DIFFERENCE * d for n, d in self._last.items()}, back)
        self.truth.append([*forward, *self._backward])

    def measure(self, ctx: StepContext) -> dict[str, Estimate]:
        answers = {name: probe.measure(ctx) for name, probe in self._probes.items()}
        self.said.append(
            {
                name: {q: (said[f"delta_h/{q}"].value, said[f"delta_h/{q}"].stderr) for q in QUANTITIES}
                for name, said in answers.items()
            }
        )
        return {"along_run/steps": Estimate(float(len(self.said)))}

    def _slope(self, ctx: StepContext, shift: Mapping[str, Tensor], origin: Mapping[str, Any]) -> list[float]:
        """Returns X · δθ of the fresh sample and its standard error, around the present parameters + origin."""
        ends = []
        for sign in (1.0, -1.0):
            with ctx.policy.shifted({name: origin[name] + sign * d for name, d in shift.items()}):
                ends.append(ctx.policy.score_rollout(self._fresh))
        terms = torch.zeros(self._num_fresh, dtype=torch.float64)
        mask = ends[0].mask == 0
        for weights, field in zip(self._weights, ("logps", "entropies"), strict=True):
            change = (getattr(ends[0], field) - getattr(ends[1], field)).double().masked_fill(mask, 0.0)
            terms += (weights * change).sum(dim=1) / (2.0 * DIFFERENCE)
        return [float(terms.mean()), float(terms.std()) / self._num_fresh**0.5]


class Progress(TrainerCallback):
    """A bar over the steps."""

    def __init__(self, bar: tqdm) -> None:
        self.bar = bar

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.bar.update()


def run(
    choices: Sequence[str], seed: int, steps: int, num_fresh: int, bar: tqdm, **settings: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the truths (steps, 2 of forward and backward, 2) and by choice what was said, (steps, quantities, 2)."""
    probe = AlongRun(choices, num_fresh, seed)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = default_trainer(scratch, [probe], steps, seed=seed, **settings)
        trainer.add_callback(Progress(bar))
        trainer.train()
    said = {
        name: torch.tensor([[of[name][q] for q in QUANTITIES] for of in probe.said], dtype=torch.float64)
        for name in choices
    }
    return torch.tensor(probe.truth, dtype=torch.float64).view(steps, 2, 2), said


def averaged(variance: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Returns the variances of a run, (steps,), averaged as the probe does, and the batches behind each."""
    running = RunningVariance(decay)
    return tuple(torch.stack(column) for column in zip(*map(running.add, variance), strict=True))


def pairs(truth: Tensor, said: Tensor, quantity: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (value − truth, raw variance, the truth's variance) of a quantity along one run, (steps,)."""
    forward, backward = truth[:, 0], truth[:, 1]
    value, stderr = said[:, QUANTITIES.index(quantity)].unbind(-1)
    if quantity == "trapezoid":
        before = torch.cat([torch.full((1, 2), torch.nan, dtype=truth.dtype), forward[:-1]])
        target, noise = 0.5 * (before[:, 0] + backward[:, 0]), 0.25 * (before[:, 1] ** 2 + backward[:, 1] ** 2)
    else:
        target, noise = (forward if quantity == "forward" else backward).unbind(-1)
        noise = noise.square()
    return value - target, stderr.square(), noise


def rows(runs: list[tuple[Tensor, dict[str, Tensor]]]) -> list[str]:
    """Returns the rows of the table."""
    lines = []
    for name in runs[0][1]:
        for quantity in QUANTITIES[:3]:
            of_runs = [pairs(truth, said[name], quantity) for truth, said in runs]
            error, raw, noise = (torch.cat(parts) for parts in zip(*of_runs, strict=True))
            known = error.isfinite()
            cells = [f"`{name}`", f"`{quantity}`", str(int(known.sum()))]
            cells.append(f"{float((error.square() - noise)[known].mean().clamp(min=0).sqrt()):.5f}")
            for decay in (0.0, *DECAYS):
                variance, batches = (
                    torch.cat(parts)[known] for parts in zip(*(averaged(of[1], decay) for of in of_runs), strict=True)
                )
                samples = (DEGREES * batches + 1e-9).floor() + 1
                quantile = torch.from_numpy(student.ppf(0.975, samples - 1))
                columns = (error[known], variance.sqrt(), samples, noise[known].sqrt())
                held = [interval_covers(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]
                wide = (quantile * variance.sqrt()).mean() / (T_7 * raw[known].sqrt()).mean()
                cells += [f"{sum(held) / len(held):.3f}"] + ([f"{float(wide):.2f}"] if decay else [])
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fresh", type=int, default=256, help="sequences that the truth of a step comes from")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--save", type=Path, help="keep all numbers of the runs so far in this file")
    options = parser.parse_args()
    runs = []
    with tqdm(total=len(options.seeds) * options.steps, unit="step") as bar:
        for seed in options.seeds:
            runs.append(
                run(options.choices, seed, options.steps, options.fresh, bar, learning_rate=options.learning_rate)
            )
            if options.save:
                torch.save(runs, options.save)
    titles = [f"decay {d}, {name}" for d in DECAYS for name in ("coverage", "width")]
    print("| X from | estimate | steps | noise | batch alone | " + " | ".join(titles) + " |")
    print("|" + "---|" * (5 + len(titles)))
    print("\n".join(rows(runs)))


if __name__ == "__main__":
    main()

"""Does the prediction of a step hold where another policy has sampled? Against large samples of the policy itself.

    OMP_NUM_THREADS=1 python benchmarks/sampler.py [--batches 300] [--settings stale-8 int5 stale-2]

A run is frozen at one step: each batch is sampled by μ (older weights, or weights rounded to 5 bits), the probe
measures the step that the optimizer makes of it, and weights and moments are put back. Truth is X of `--truth` fresh
responses, times the very step. Printed: divergence, effective sample size, the share of the 95 % intervals of `forward`
that hold the truth, and X along two fixed directions, with and without ratios.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import statistics
import tempfile
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback

from rl_training import DrGRPOConfig, DrGRPOTrainer, Probe
from rl_training.engine.entropy_change import measure_entropy_change
from rl_training.engine.memory import StepMemory
from rl_training.engine.probe import Need
from rl_training.engine.step import EntropyChange, Step
from rl_training.engine.step_check import StepGuard
from rl_training.hosts.trl.lagging_sampler import LaggingSampler
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.mathematics.entropy import surrogate_weights
from rl_training.mathematics.vectors import dot
from rl_training.probes import SamplerProbe, SimpleEntropyProbe
from rl_training.tasks.arithmetic import arithmetic
from rl_training.tasks.models import load_tiny

StepGuard.notice_edits = lambda self: None  # type: ignore[method-assign]  # steps begin at given weights, on purpose
LR, BETA2 = 3e-4, 0.99
Named = dict[str, Tensor]


class Frozen(TrainerCallback):
    """Keeps the weights of every step and the last optimizer state; or puts a state back before each step."""

    def __init__(self, state: tuple[Named, dict[str, Any]] | None = None) -> None:
        self.state = state
        self.weights: list[Named] = []
        self.momentum: Named = {}  # the step that the moments alone would make

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self.state is None:
            self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
            self.optimizer = copy.deepcopy(optimizer.state_dict())
            names = {id(p): name for name, p in model.named_parameters()}
            for p, moments in optimizer.state.items():
                root = (moments["exp_avg_sq"] / (1 - BETA2 ** float(moments["step"]))).sqrt() + 1e-8
                self.momentum[names[id(p)]] = -LR * moments["exp_avg"] / root
            return
        for name, p in model.named_parameters():
            p.data.copy_(self.state[0][name])
        optimizer.load_state_dict(copy.deepcopy(self.state[1]))


class Fixed(LaggingSampler):
    """Samples with these weights, always."""

    fixed: Named

    def weights(self) -> Named:
        return self.fixed


class Against(SamplerProbe):
    """Holds the step's prediction and X along given directions against the truth."""

    name, needs = "against", Need.ENTROPY_CHANGE | Need.ENTROPY_ROWS

    def __init__(self, setting: str, truth: Named, directions: list[Named], other_half: list[Named]) -> None:
        super().__init__()
        self.setting, self.truth, self.directions, self.other_half = setting, truth, directions, other_half
        self.rows: list[list[float]] = []
        self.far: list[list[float]] = []

    def prepare(self, step: Step) -> None:
        super().prepare(step)
        tokens = float(step.batch.scores.mask.sum()) / step.num_sequences
        self.far.append([*(self._answers[f"sampler/{name}"].value for name in ("kl", "ess")), tokens])
        change, layout = step.entropy_change, step.gradients.layout
        if change.why_none:
            return
        rollout = dataclasses.replace(step.batch.rollout, sampling_logps=None)
        bare = dataclasses.replace(step, batch=dataclasses.replace(step.batch, rollout=rollout))
        assert step.policy.shard is not None
        memory = StepMemory(layout, step.policy.shard, change.settings)
        without = measure_entropy_change(bare, memory, Need.ENTROPY_ROWS)
        forward = change.quantities["forward"].estimates(step.num_folds)[0]
        assert change.update is not None
        truth = float(dot(layout.vector(self.truth[name] for name in layout.names), change.update))
        along = [
            product(each, step.fold_sizes, layout.vector(direction[name] for name in layout.names))
            for each in (change, without)
            for direction in self.directions
        ]
        self.rows.append([forward.value, forward.half_width(), truth, *along])
        if len(self.rows) % 25 == 0:
            self.report()

    def report(self) -> None:
        """Prints what the batches so far come to."""
        kl, ess, tokens = map(statistics.fmean, zip(*self.far, strict=True))
        held = [abs(value - truth) <= width for value, width, truth, *_ in self.rows]
        error = [value - truth for value, _, truth, *_ in self.rows]
        number = len(held)
        print(f"{self.setting}: KL {kl:.2e}, {tokens:.1f} tokens, ESS {ess:.3f}, {number} of {len(self.far)}; covered "
              f"{statistics.fmean(held):.3f}, mean error {1e3 * statistics.fmean(error):+.4f} ± "
              f"{1e3 * statistics.stdev(error) / math.sqrt(number):.4f} mnats", flush=True)  # fmt: skip
        for i, direction in enumerate(self.directions):
            truths = [sum(float((part[n] * direction[n]).sum()) for n in part) for part in self.other_half]
            se = statistics.stdev(truths) / math.sqrt(len(truths))
            line = (
                f"  X along {('momentum', 'X itself')[i]}: truth {1e3 * statistics.fmean(truths):.4f} ± {1e3 * se:.4f}"
            )
            for word, column in (("with ratios", 3 + i), ("without", 3 + len(self.directions) + i)):
                values = [row[column] for row in self.rows]
                sd = statistics.stdev(values)
                mean = 1e3 * statistics.fmean(values)
                line += f"; {word} {mean:.4f} ± {1e3 * sd / math.sqrt(number):.4f} (sd {1e3 * sd:.4f})"
            print(line, flush=True)


def product(change: EntropyChange, sizes: Tensor, direction: Any) -> float:
    """Returns ∂H_tok · direction, from the X of all folds."""
    assert change.rows is not None
    assert change.levels is not None
    by_fold = [float(dot([part[k] for part in change.rows], direction)) for k in range(len(sizes))]
    return sum(n * x for n, x in zip(sizes.tolist(), by_fold, strict=True)) / float(change.levels[:, 2].sum())


def trainer(probes: list[Probe], callback: Frozen, steps: int, folder: str, seed: int, **more: Any) -> DrGRPOTrainer:
    model, tokenizer = load_tiny()
    if callback.state is not None:
        model.load_state_dict(callback.state[0], strict=False)
    task = arithmetic(num_train=2048, num_eval=8)
    args = DrGRPOConfig(
        output_dir=folder, per_device_train_batch_size=16, gradient_accumulation_steps=8, num_generations=8,
        max_completion_length=36, max_steps=steps, learning_rate=LR, adam_beta2=BETA2, lr_scheduler_type="constant",
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=seed,
    )  # fmt: skip
    made = DrGRPOTrainer(
        model=model, reward_funcs=task.reward, args=args, train_dataset=task.train_dataset, processing_class=tokenizer,
        probes=probes, callbacks=[callback], **more,
    )  # fmt: skip
    made.remove_callback(PrinterCallback)
    return made


def large_sample(policy: TrainerPolicy, count: int, seed: int) -> list[Named]:
    """Returns ∂H_tok by name from parts of 512 of so many fresh responses, baselines over each part."""
    found = []
    for part in range(count // 512):
        rollout = policy.sample(512, seed + part)
        scores = policy.score_rollout(rollout)
        weights = surrogate_weights(scores.entropies, scores.mask, rollout.prompt_index, "token", "buffer")
        parameters = dict(policy.model.named_parameters())
        sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for rows in torch.arange(512).split(64):
            fresh = policy.score(rollout, rows)
            width = fresh.logps.shape[1]
            gradients = torch.autograd.grad(
                [fresh.logps, fresh.entropies], list(parameters.values()), [w[rows, :width] / 512 for w in weights]
            )
            for name, gradient in zip(parameters, gradients, strict=True):
                sums[name] += gradient
        found.append(sums)
    return found


def five_bits(weights: Named) -> Named:
    rounded = {}
    for name, w in weights.items():
        scale = (w.abs().amax(-1, keepdim=True) / 15).clamp(min=1e-12)
        rounded[name] = w if w.dim() < 2 else (w / scale).round() * scale
    return rounded


def mean_of(parts: list[Named]) -> Named:
    return {name: torch.stack([part[name] for part in parts]).mean(dim=0) for name in parts[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--truth", type=int, default=4096)
    parser.add_argument("--state", type=int, default=20, help="the step at which the run is frozen")
    parser.add_argument("--settings", nargs="+", default=["stale-8", "int5", "stale-2"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Frozen()
        first = trainer([], run, args.state + 1, folder, seed=0)
        first.train()
        weights, optimizer = run.weights[args.state], run.optimizer
        first.model.load_state_dict(weights, strict=False)
        parts = large_sample(TrainerPolicy(first), args.truth, seed=77)
        half = len(parts) // 2
        directions = [run.momentum, mean_of(parts[:half])]
        for setting in args.settings:
            lag = int(setting.partition("-")[2] or 0)
            sampler = five_bits(weights) if setting == "int5" else run.weights[args.state - lag]
            probe = Against(setting, mean_of(parts), directions, parts[half:])
            probes = [SimpleEntropyProbe(num_folds=8), probe]
            again = trainer(probes, Frozen((weights, optimizer)), args.batches, folder, seed=1, sampler_lag=1)
            again.lagging_sampler = Fixed(again, TrainerPolicy(again), 1)
            again.lagging_sampler.fixed = sampler
            again.train()
            probe.report()


if __name__ == "__main__":
    main()

"""Are the measurements of the probe `measured` right for any optimizer? Checks them against large fresh samples.

    OMP_NUM_THREADS=1 python benchmarks/measured_steps.py [--conditions muon lion] [--steps 2 6 10] [--only-report]

Trains the default task with each optimizer. At some steps it draws 512 prompts x 8 responses before the step, and the
same number after it. The first sample, scored with the weights before and after the step, gives the truth. The second
is split into 16 batches of 32 prompts. Each is measured as the probe measures its single batch, from 1, 2 and all 8
responses of every prompt. The table shows the coverage of the 95 % intervals, the ratio of the sums, and the error of a
single step. Batches with an effective sample size below the probe's minimum are left out, as the probe does.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from default_task import default_trainer
from peft import LoraConfig
from torch import Tensor

from rl_training import Estimate, Probe, Reading
from rl_training.engine.context import StepContext
from rl_training.entropy.previous_policy import differences_before
from rl_training.hosts.trl.policy import respond
from rl_training.policy.rollout import Rollout, as_rollout
from rl_training.policy.scores import Scores
from rl_training.probes.measured import CHANGES, ESS, KL, MIN_ESS, statistic
from rl_training.statistics.calibration import interval_covers
from rl_training.statistics.jackknife import estimates_over_units

PROMPTS, RESPONSES, BATCHES = 512, 8, 16
SCORED = (1, 2, 8)  # responses of every prompt
ENTROPY, LENGTH = CHANGES[0], CHANGES[2]


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023): steps by the sign of an average of gradients. The engine has no formula for it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                param.sub_(group["lr"] * torch.lerp(average, param.grad, 0.1).sign())
                average.lerp_(param.grad, 0.01)


def muon(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in parameters if param.ndim == 2], lr=2e-3)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "muon": muon,
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=3e-3),
    "lion": lambda parameters: Lion(parameters, lr=1e-4),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw 3e-4": {},
    "adamw 1e-3": {"learning_rate": 1e-3},
    "sgd": {"optim": "sgd", "learning_rate": 0.05},
    "lora": {"learning_rate": 2e-3, "peft_config": LoraConfig(r=16, target_modules="all-linear")},
}


class FreshSampleProbe(Probe):
    """Measures the given steps on many fresh prompts, with samples drawn before and after each step."""

    name = "bank"

    def __init__(self, trainer: Callable[[], Any], seed: int, steps: Sequence[int]) -> None:
        super().__init__()
        self.trainer, self.seed, self.steps = trainer, seed, steps
        self.rows: list[dict[str, Any]] = []

    def draw(self, number: int) -> Rollout:
        trainer, drawn = self.trainer(), torch.Generator().manual_seed((self.seed << 20) + number)
        prompts = torch.randint(len(trainer.train_dataset), (PROMPTS,), generator=drawn).tolist()
        texts = [trainer.train_dataset[row]["prompt"] for row in prompts for _ in range(RESPONSES)]
        index = torch.arange(PROMPTS).repeat_interleave(RESPONSES).tolist()
        return as_rollout(*respond(trainer, texts, self.seed, number), index, trainer._tokenizer.pad_token_id)

    def measure(self, ctx: StepContext, state: Any) -> Reading:
        step = ctx.step
        if step.number in self.steps:
            assert ctx.policy.shard is not None
            self.rollout, self.held = self.draw(2 * step.number), ctx.policy.shard.copy_local_weights()
            self.scores = ctx.policy.score_rollout(self.rollout)
        return Reading(measured={"bank/true": Estimate.missing("this step is not one of them")})

    def after_step(self, ctx: StepContext, reading: Reading) -> Reading:
        step = ctx.step
        if step.number not in self.steps:
            return reading
        truth = estimates_of(by_prompt(self.rollout, self.scores, ctx.policy.score_rollout(self.rollout), RESPONSES))
        row: dict[str, Any] = {"step": step.number} | {
            name: [-truth[name].value, truth[name].stderr] for name in (ENTROPY, LENGTH)
        }
        fresh = self.draw(2 * step.number + 1)
        after = ctx.policy.score_rollout(fresh)
        with ctx.policy.with_weights(self.held):
            before = ctx.policy.score_rollout(fresh)
        for count in SCORED:
            parts = [estimates_of(part) for part in by_prompt(fresh, after, before, count).chunk(BATCHES)]
            row[str(count)] = [
                {name: [part[name].value, part[name].stderr, part[name].num_samples] for name in (ENTROPY, LENGTH)}
                for part in parts
                if part[ESS].value >= MIN_ESS
            ]
        self.rows.append(row)
        return Reading(measured={"bank/true": Estimate(row[ENTROPY][0])})


def by_prompt(rollout: Rollout, scores: Scores, others: Scores, count: int) -> Tensor:
    """Return (prompts, 11): the sums that the probe's `statistic` takes, over `count` responses of every prompt."""
    rows = torch.arange(PROMPTS * RESPONSES).view(PROMPTS, -1)[:, :count].reshape(-1)
    some = Scores(others.logps[rows], others.entropies[rows], others.mask[rows])
    terms = differences_before(
        scores, some, rows, rollout.prompt_index, torch.zeros(len(scores.mask)), torch.zeros_like(scores.logps)
    )
    mask = scores.mask.double()
    levels = torch.stack([(scores.entropies.double() * mask).nan_to_num().sum(dim=1), mask.sum(dim=1)], dim=1)
    again = terms[:, 4].exp()
    columns = torch.stack([*terms[:, :4].unbind(dim=1), levels[rows, 1], again, again.square()], dim=1)
    parts = [torch.nn.functional.pad(part, (1, 0), value=1.0) for part in (levels, columns)]
    return torch.cat([part.view(PROMPTS, -1, part.shape[1]).sum(dim=1) for part in parts], dim=1)


def estimates_of(sums: Tensor) -> dict[str, Estimate]:
    return estimates_over_units((*CHANGES, KL, ESS), statistic, sums)


def train(condition: str, seed: int, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each of these steps: the truth, and the estimates of every batch."""
    bank = FreshSampleProbe(lambda: trainer, seed, steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer = default_trainer(folder, [bank], max(steps), seed=seed, **SETTINGS.get(condition, {}))
        trainer.attachment._policy._batch_size = 256  # for forward passes: large batches are faster here
        if condition in OPTIMIZERS:
            trainer.optimizer = OPTIMIZERS[condition]([p for p in trainer.model.parameters() if p.requires_grad])
        trainer.train()
    return [{"condition": condition, "seed": seed} | row for row in bank.rows]


def report(rows: Sequence[dict[str, Any]]) -> None:
    titles = ("optimizer", "responses", "batches", "coverage", "Σ / Σ true", "error, 1e-3", "coverage, length",
              "Σ / Σ true, length")  # fmt: skip
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for condition in [*dict.fromkeys(row["condition"] for row in rows), None]:
        rows_of_condition = [row for row in rows if condition in (None, row["condition"])]
        for count in SCORED:
            number = sum(len(row[str(count)]) for row in rows_of_condition)
            held, ratio, error = cells(rows_of_condition, str(count), ENTROPY)
            held_length, ratio_length, _ = cells(rows_of_condition, str(count), LENGTH)
            print(f"| {condition or 'all'} | {count} of {RESPONSES} | {number} | {held} | {ratio} | {error} "
                  f"| {held_length} | {ratio_length} |")  # fmt: skip


def cells(rows: Sequence[dict[str, Any]], count: str, name: str) -> list[str]:
    """Return the coverage, Σ mean measurement / Σ truth over the steps, and the error of one batch (in 1e-3)."""
    held, squares, total, true, variance = [], [], 0.0, 0.0, 0.0
    for row in rows:
        value, noise = row[name]
        batches = [batch[name] for batch in row[count]]
        held += [interval_covers(estimate - value, stderr, units, noise) for estimate, stderr, units in batches]
        squares += [(estimate - value) ** 2 - noise**2 for estimate, _, _ in batches]
        if len(batches) > 1:
            values = [estimate for estimate, _, _ in batches]
            total, true = total + statistics.fmean(values), true + value
            variance += statistics.variance(values) / len(values) + noise**2
    ratio = f"{total / true:.3f} ± {math.sqrt(variance) / abs(true):.3f}"
    return [f"{statistics.fmean(held):.3f}", ratio, f"{1e3 * math.sqrt(max(statistics.fmean(squares), 0.0)):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    conditions = [*SETTINGS, *OPTIMIZERS]
    parser.add_argument("--conditions", nargs="+", choices=conditions, default=conditions)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[2, 6, 10, 14, 18])
    parser.add_argument("--output", type=Path, default=Path("runs/measured_steps.jsonl"))
    parser.add_argument("--only-report", action="store_true")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for seed, condition in [(s, c) for s in options.seeds for c in options.conditions if not options.only_report]:
        rows = train(condition, seed, options.steps)
        with options.output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    report([json.loads(line) for line in options.output.read_text("utf-8").splitlines()])


if __name__ == "__main__":
    main()

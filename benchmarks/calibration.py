"""Do the predictions come true? Compare each step's predicted entropy change with one measured on fresh sequences.

    OMP_NUM_THREADS=1 python benchmarks/calibration.py [--conditions "rate 1e-4" default lora] [--seeds 0 1 2]

Trains the default task once for each condition and seed, with the probe `simple`. Around every optimizer step it
measures the true ΔH on an evaluation set of fresh responses to random prompts (probes/ground_truth.py: importance
weights while their effective sample size suffices, otherwise a new sample with the same random numbers). For comparison
it also records the estimate from importance weights on the training batch itself, which is not a ground truth. The
second table has sums over whole runs.

At one step of each run it also moves the parameters by η δθ for η = 2^-6 .. 2 and measures ΔH there, always on the same
evaluation set: is the change linear in the step?

Each run writes its measurements to OUTPUT/CONDITION_seed_SEED/logs. A complete run is not repeated, so you can stop and
continue, or share the runs among several processes. --only-report makes the tables and the picture from existing runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from calibration_tables import DRAWN, EXPONENTS, LINEARITY_STEP, SAME_BATCH, Run, draw, print_report, read_run
from default_task import Progress, default_trainer
from peft import LoraConfig
from torch import Tensor
from tqdm import tqdm

from rl_training import Estimate, Reading
from rl_training.engine.context import StepContext
from rl_training.probes import GroundTruthProbe, SimpleEntropyProbe
from rl_training.probes.importance import importance_weights, reweighted_replicates, sequence_totals
from rl_training.records.jsonl import read_estimates
from rl_training.records.writer import Records

CONDITIONS: dict[str, dict[str, Any]] = {
    "rate 1e-4": {"learning_rate": 1e-4},
    "default": {},
    "rate 1e-3": {"learning_rate": 1e-3},
    "lora": {"learning_rate": 2e-3},
    "sgd": {"optim": "sgd", "learning_rate": 0.05},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.3": {"temperature": 1.3},
    "G = 4": {"num_generations": 4},
    "G = 16": {"num_generations": 16},
    "decay 1": {"weight_decay": 1.0},
    "clipping 0.05": {"max_grad_norm": 0.05},
    "truncation 20": {"max_completion_length": 20},
    # The whole step is one microbatch: folds are slices of it, and each needs a separate pass.
    "one microbatch": {"per_device_train_batch_size": 256, "gradient_accumulation_steps": 1},
}


def _trained(ctx: StepContext) -> dict[str, Tensor]:
    parameters = dict(ctx.policy.model.named_parameters())
    return {name: parameters[name] for name in ctx.step.weights}


class TruthOfEachStep(GroundTruthProbe):
    """Measures the entropy change of every step, and at `linearity_step` also of scaled copies of the step."""

    def __init__(self, num_sequences: int, seed: int, linearity_step: int) -> None:
        super().__init__(1, num_sequences, seed)
        self.linearity_step = linearity_step

    def measure(self, ctx: StepContext, state: Any) -> Reading:
        step = ctx.step
        reading = super().measure(ctx, state)
        self._batch = sequence_totals(step.batch.scores)
        if step.number == self.linearity_step:
            self._evaluation = ctx.policy.sample(self.sequences, 10_000 + self.seed)
            self._before = sequence_totals(ctx.policy.score_rollout(self._evaluation))
            self._old = {name: p.detach().clone() for name, p in _trained(ctx).items()}
        return reading

    def after_step(self, ctx: StepContext, reading: Reading) -> Reading:
        step = ctx.step
        reading = super().after_step(ctx, reading)
        after = sequence_totals(ctx.policy.score_rollout(step.batch.rollout))
        same_batch = reweighted_replicates(self._batch, after).value[0]
        extra = {SAME_BATCH: Estimate(float(same_batch), reason="no error bar: its error is a bias")}
        if step.number == self.linearity_step:
            extra |= dict(self._along_the_step(ctx))
        return dataclasses.replace(reading, measured={**reading.measured, **extra})

    @torch.no_grad()
    def _along_the_step(self, ctx: StepContext) -> Iterator[tuple[str, Estimate]]:
        new = {name: p.detach().clone() for name, p in _trained(ctx).items()}
        for exponent in EXPONENTS:
            for name, param in _trained(ctx).items():
                param.copy_(self._old[name] + 2.0**exponent * (new[name] - self._old[name]))
            after = sequence_totals(ctx.policy.score_rollout(self._evaluation))
            change = reweighted_replicates(self._before, after)
            ess = importance_weights(self._before, after).ess / len(after)
            yield f"linearity/{exponent}", Estimate(float(change.value[0]), float(change.stderr[0]), len(after))
            yield f"linearity_ess/{exponent}", Estimate(ess)
        for name, param in _trained(ctx).items():
            param.copy_(new[name])


def run_folder(output: Path, condition: str, seed: int) -> Path:
    return output / f"{condition.replace(' ', '_')}_seed_{seed}" / "logs"


def is_complete(folder: Path, steps: int) -> bool:
    """Return whether the run has recorded its last step, one after the last evaluated: the last trapezoid needs it."""
    return any(row["step"] == steps + 1 for row in read_estimates(folder))


def train(folder: Path, condition: str, seed: int, steps: int, num_sequences: int, bar: tqdm) -> None:
    """Train one run and record every prediction and every measured change."""
    probes = [SimpleEntropyProbe(), TruthOfEachStep(num_sequences, seed, min(LINEARITY_STEP, steps))]
    settings = dict(CONDITIONS[condition])
    if condition == "lora":
        settings["peft_config"] = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as scratch:
        trainer = default_trainer(scratch, probes, steps + 1, seed=seed, records=Records(folder), **settings)
        trainer.add_callback(Progress(bar))
        trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(DRAWN))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--sequences", type=int, default=1024, help="in each evaluation set; another number needs another --output"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/calibration"))
    parser.add_argument("--picture", type=Path, default=Path("docs/figures/calibration.png"))
    parser.add_argument("--only-report", action="store_true", help="do not train, report the complete runs")
    options = parser.parse_args()
    wanted = [(condition, seed) for seed in options.seeds for condition in options.conditions]
    todo = [key for key in wanted if not is_complete(run_folder(options.output, *key), options.steps)]
    if not options.only_report:
        with tqdm(total=len(todo) * (options.steps + 1), unit="step") as bar:
            for condition, seed in todo:
                folder = run_folder(options.output, condition, seed)
                train(folder, condition, seed, options.steps, options.sequences, bar)
        todo = []
    runs: dict[str, list[Run]] = {}
    for condition, seed in wanted:
        if (condition, seed) not in todo:
            runs.setdefault(condition, []).append(read_run(run_folder(options.output, condition, seed)))
    if not runs:
        parser.error(f"no complete run of {options.steps} steps in {options.output}")
    print_report(runs, options.steps)
    drawn = {condition: alike for condition, alike in runs.items() if condition in DRAWN}
    if drawn:
        draw(drawn, options.steps, options.picture)


if __name__ == "__main__":
    main()

"""The gradient noise scale that the loop reports, against a direct measurement at one checkpoint.

    OMP_NUM_THREADS=1 python benchmarks/noise_scale.py [--steps 40] [--stopped-steps 40] [--prompts 1024]

Trains the default task with the probe `gns`, then stops the policy and measures on fresh rollouts

    in the loop   steps of learning rate 0 with the probe: square norms of microbatch gradients
    directly      the gradient of each prompt on its own, from the definition of the Dr-GRPO loss: its covariance's
                  trace, and the square of the mean gradient less what noise adds to it; delete-one-prompt jackknife

While it trains the loop's running average speaks of the last 20 to 40 steps, in which the policy moves; of the stopped
policy both must say the same. Prints a Markdown table; differences are to the direct measurement, in standard errors.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback

from rl_training import DrGRPOConfig, DrGRPOTrainer, Estimate, Probe
from rl_training.engine.step import Step
from rl_training.job.run import StepProgress
from rl_training.mathematics.jackknife import jackknife_stderr
from rl_training.probes import GradientNoiseScaleProbe
from rl_training.tasks.arithmetic import arithmetic
from rl_training.tasks.models import load_tiny

PROMPTS_PER_STEP, G, MAX_LENGTH = 32, 8, 36
ROWS = {
    "tr Σ": "gns/trace",
    "\\|G\\|²": "gns/grad_sq_norm",
    "tr Σ / \\|G\\|², prompts": "gns/noise_scale_prompts",
}


class NoiseScale(GradientNoiseScaleProbe):
    """The probe, with its last answers kept."""

    def results(self) -> dict[str, Estimate]:
        self.last = super().results()
        return self.last


class PromptGradients(Probe):
    """Keeps the gradient of each prompt: of −Σ A ∂S / L_max, mean over its responses, one backward a prompt."""

    name = "prompt_gradients"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []

    def prepare(self, step: Step) -> None:
        index = step.batch.rollout.prompt_index
        for prompt in tqdm(index.unique(), desc="prompts", leave=False):
            rows = (index == prompt).nonzero().squeeze(1)
            scores = step.policy.score(step.batch.rollout, rows)
            loss = -(step.batch.rollout.advantages[rows] @ (scores.logps * scores.mask).sum(dim=1)) / (
                len(rows) * MAX_LENGTH
            )
            gradient = torch.autograd.grad(loss, list(step.gradients.parameters.values()))
            self.rows.append(torch.cat([g.flatten() for g in gradient]))

    def results(self) -> dict[str, Estimate]:
        return {"prompt_gradients/count": Estimate(float(len(self.rows)))}


def direct_estimates(gradients: Tensor) -> dict[str, Estimate]:
    """Returns tr Σ, |G|² and their ratio from the gradients of independent prompts, (n, P)."""
    total = gradients.sum(dim=0, dtype=torch.float64)
    squares = gradients.double().square().sum(dim=1)
    with_total = gradients.double() @ total
    sums = torch.stack([squares.sum(), total @ total, torch.tensor(len(squares)).double()])
    without = torch.stack(
        [sums[0] - squares, sums[1] - 2 * with_total + squares, (sums[2] - 1).expand_as(squares)], dim=1
    )

    def statistic(of: Tensor) -> Tensor:
        square, square_of_sum, count = of.unbind(-1)
        trace = (square - square_of_sum / count) / (count - 1)
        grad_sq_norm = (square_of_sum - square) / (count * (count - 1))
        return torch.stack([trace, grad_sq_norm, trace / grad_sq_norm], dim=-1)

    errors = jackknife_stderr(statistic, sums, without, reduce=lambda tensor: tensor)
    triples = zip(ROWS.values(), statistic(sums).tolist(), errors.tolist(), strict=True)
    return {name: Estimate(value, error, len(squares)) for name, value, error in triples}


def train(model: Any, probe: Probe, steps: int, seed: int, learning_rate: float) -> None:
    """Trains `model` as the default task does."""
    task, tokenizer = arithmetic(), load_tiny()[1]
    with tempfile.TemporaryDirectory() as folder:
        args = DrGRPOConfig(
            folder,
            seed=seed,
            per_device_train_batch_size=PROMPTS_PER_STEP * G // 8,
            gradient_accumulation_steps=8,
            num_generations=G,
            max_completion_length=MAX_LENGTH,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            adam_beta2=0.99,
            max_steps=steps,
            report_to=[],
            save_strategy="no",
        )
        trainer = DrGRPOTrainer(
            model, task.reward, args, task.train_dataset, processing_class=tokenizer, probes=[probe]
        )
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(StepProgress)
        trainer.train()


def markdown(running: Mapping[str, Estimate], stopped: Mapping[str, Estimate], direct: Mapping[str, Estimate]) -> str:
    lines = ["| | in the loop, while training | in the loop, policy stopped | directly |", "|---|---|---|---|"]
    for title, name in ROWS.items():
        exact = direct[name]
        cells = []
        for estimate in (running[name], stopped[name]):
            gap = (estimate.value - exact.value) / math.hypot(estimate.stderr, exact.stderr)
            cells.append(f"{estimate.value:.4g} ± {estimate.stderr:.2g} ({gap:+.1f})")
        lines.append(f"| {title} | {cells[0]} | {cells[1]} | {exact.value:.4g} ± {exact.stderr:.2g} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of training")
    parser.add_argument("--stopped-steps", type=int, default=40, help="of the loop on the stopped policy")
    parser.add_argument("--prompts", type=int, default=1024, help="of the direct measurement, rounded up to steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = load_tiny()[0]
    running, stopped, prompts = NoiseScale(), NoiseScale(), PromptGradients()
    train(model, running, options.steps, options.seed, learning_rate=3e-4)
    train(model, stopped, options.stopped_steps, options.seed + 1, learning_rate=0.0)
    train(model, prompts, math.ceil(options.prompts / PROMPTS_PER_STEP), options.seed + 2, learning_rate=0.0)
    print(markdown(running.last, stopped.last, direct_estimates(torch.stack(prompts.rows))))


if __name__ == "__main__":
    main()

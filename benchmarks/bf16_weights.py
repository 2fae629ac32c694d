"""Weights that are kept in bf16: does the measured change of entropy come to what the rounded steps predict?

    OMP_NUM_THREADS=1 python benchmarks/bf16_weights.py [--steps 25] [--rate 1e-4] [--seeds 0 1] [--dtypes bfloat16]

The default task in full training, with weights, Adam's moments and gradients in bf16, or in fp32. The change over all
steps is measured on fresh responses, with the same prompts and random numbers at both ends, and held against the sum of
trapezoids. The share is the mean of update/surviving_share.
"""

from __future__ import annotations

import argparse
import tempfile

import rl_training.job.silence  # noqa: F401

import torch
from transformers import PrinterCallback, set_seed

from rl_training import DrGRPOConfig, DrGRPOTrainer, Estimate, Probe
from rl_training.engine.step import Step
from rl_training.mathematics.importance import paired_replicates, sequence_totals
from rl_training.mathematics.jackknife import Replicates
from rl_training.probes import SimpleEntropyProbe
from rl_training.tasks.arithmetic import arithmetic
from rl_training.tasks.models import load_tiny


class Ends(Probe):
    """Draws fresh responses before the first step and before the one after the last."""

    name = "ends"

    def __init__(self, steps: int, sequences: int) -> None:
        super().__init__(every=steps)
        self.sequences = sequences
        self.totals: list[torch.Tensor] = []

    def prepare(self, step: Step) -> None:
        self.totals.append(sequence_totals(step.policy.score_rollout(step.policy.sample(self.sequences, seed=1))))
        self._answers = {"ends/drawn": Estimate(float(len(self.totals)))}

    @property
    def change(self) -> Replicates:
        """ΔH per token and per sequence."""
        return paired_replicates(*self.totals)


def train(dtype: str, rate: float, steps: int, seed: int, sequences: int) -> None:
    """Trains, and prints one line."""
    set_seed(seed)
    model, tokenizer = load_tiny()
    task, simple, ends = arithmetic(), SimpleEntropyProbe(), Ends(steps, sequences)
    with tempfile.TemporaryDirectory() as folder:
        args = DrGRPOConfig(
            folder, max_steps=steps + 1, learning_rate=rate, lr_scheduler_type="constant", adam_beta2=0.99,
            per_device_train_batch_size=32, gradient_accumulation_steps=8, num_generations=8, seed=seed,
            max_completion_length=36, use_cpu=not torch.cuda.is_available(), bf16=False, report_to=[],
            save_strategy="no", disable_tqdm=True, logging_steps=1,
        )  # fmt: skip
        trainer = DrGRPOTrainer(
            model.to(getattr(torch, dtype)), task.reward, args, train_dataset=task.train_dataset,
            processing_class=tokenizer, probes=[simple, ends],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    lines = [line for line in trainer.state.log_history if "update/surviving_share" in line][:steps]
    share = sum(line["update/surviving_share"] for line in lines) / len(lines)
    error = max(line["step/formula_error"] for line in lines)
    change, predicted = ends.change, simple.results()["delta_h/cumulative_predicted"]
    print(
        f"{dtype} lr {rate:g} seed {seed}: measured {1e3 * float(change.value[0]):+.2f} ± "
        f"{2e3 * float(change.stderr[0]):.2f} mnats, sum of trapezoids {1e3 * predicted.value:+.2f} ± "
        f"{1e3 * predicted.half_width():.2f}; share {share:.3f}; step/formula_error at most {error:.2g}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=("bfloat16", "float32"))
    parser.add_argument("--sequences", type=int, default=2048, help="fresh responses at each end")
    options = parser.parse_args()
    for dtype in options.dtypes:
        for seed in options.seeds:
            train(dtype, options.rate, options.steps, seed, options.sequences)


if __name__ == "__main__":
    main()

"""What probes add to a step of the default task: one run, the probes on at every second step.

    OMP_NUM_THREADS=1 python benchmarks/step_overhead.py [--probes simple gns ess] [--steps 80]

Steps with and without the probes alternate within one run, so that both see the same model and the same machine; the
ratio of the medians of their wall times is printed, with quartiles. Generation is part of a step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from rl_training import DrGRPOConfig, DrGRPOTrainer
from rl_training.probes import EffectiveSampleSizeProbe, GradientNoiseScaleProbe, SimpleEntropyProbe
from rl_training.tasks.arithmetic import arithmetic
from rl_training.tiny import TINY_PATH

PROBES = {"simple": SimpleEntropyProbe, "gns": GradientNoiseScaleProbe, "ess": EffectiveSampleSizeProbe}


class StepTimer(TrainerCallback):
    """Wall seconds of each optimizer step, generation included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def step_seconds(steps: int, probes: list[str]) -> list[float]:
    """Returns the wall seconds of each step; the probes are on at the first, third, ... of them."""
    task = arithmetic()
    with tempfile.TemporaryDirectory() as folder:
        trainer = DrGRPOTrainer(
            AutoModelForCausalLM.from_pretrained(TINY_PATH),
            task.reward,
            DrGRPOConfig(
                folder,
                per_device_train_batch_size=32,
                gradient_accumulation_steps=8,
                num_generations=8,
                max_completion_length=36,
                learning_rate=3e-4,
                adam_beta2=0.99,
                max_steps=steps,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=task.train_dataset,
            processing_class=AutoTokenizer.from_pretrained(TINY_PATH),
            probes=[PROBES[name](every=2) for name in probes],
        )
        trainer.remove_callback(PrinterCallback)
        timer = StepTimer()
        trainer.add_callback(timer)  # last, so that it also times what the probe does at the end of a step
        trainer.train()
    return timer.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--probes", nargs="+", choices=PROBES, default=["simple"])
    options = parser.parse_args()
    seconds = step_seconds(options.steps, options.probes)[4:]  # the first ones warm up
    on, off = seconds[0::2], seconds[1::2]
    for name, values in (("on", on), ("off", off)):
        low, median, high = statistics.quantiles(values, n=4)
        print(f"probes {name:3}  median {median:.3f} s  quartiles {low:.3f} .. {high:.3f}  ({len(values)} steps)")
    print(f"ratio of medians {statistics.median(on) / statistics.median(off):.3f}")


if __name__ == "__main__":
    main()

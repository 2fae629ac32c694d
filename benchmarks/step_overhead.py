"""What probes add to a step of the default task, or of a LoRA on a larger model: one run, on at every second step.

    OMP_NUM_THREADS=1 python benchmarks/step_overhead.py [--probes simple gns ess] [--steps 80] [--model lora512]

Steps with and without the probes alternate within one run, so that both see the same model and the same machine. Each
pair of adjacent steps gives one ratio; their median and quartiles are printed, of wall time and of CPU time, which
other jobs on the machine disturb less. Generation is part of a step. `lora512` is a Qwen2 of random weights, hidden
size 512 and 6 layers, whose LoRA of rank 16 on all linear layers is trained on short completions.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from rl_training import DrGRPOConfig, DrGRPOTrainer
from rl_training.probes import EffectiveSampleSizeProbe, GradientNoiseScaleProbe, SimpleEntropyProbe
from rl_training.tasks.arithmetic import arithmetic
from rl_training.tiny import TINY_PATH

PROBES = {"simple": SimpleEntropyProbe, "gns": GradientNoiseScaleProbe, "ess": EffectiveSampleSizeProbe}
BATCHES: dict[str, dict[str, Any]] = {
    "tiny": {
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 8,
        "num_generations": 8,
        "max_completion_length": 36,
        "learning_rate": 3e-4,
    },
    "lora512": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 1e-5,
    },
}


CLOCKS = {"wall": time.perf_counter, "CPU": time.process_time}


class StepTimer(TrainerCallback):
    """Seconds of each optimizer step by each clock, generation included."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in CLOCKS}

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = {name: clock() for name, clock in CLOCKS.items()}

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        for name, clock in CLOCKS.items():
            self.seconds[name].append(clock() - self._start[name])


def model_with_adapter(name: str) -> tuple[Any, LoraConfig | None]:
    if name == "tiny":
        return AutoModelForCausalLM.from_pretrained(TINY_PATH), None
    config = Qwen2Config.from_pretrained(
        TINY_PATH,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        layer_types=["full_attention"] * 6,
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return Qwen2ForCausalLM(config), lora


def step_seconds(steps: int, probes: list[str], model_name: str) -> dict[str, list[float]]:
    """Returns the seconds of each step by clock; the probes are on at the first, third, ... of them."""
    task = arithmetic()
    model, lora = model_with_adapter(model_name)
    with tempfile.TemporaryDirectory() as folder:
        trainer = DrGRPOTrainer(
            model,
            task.reward,
            DrGRPOConfig(
                folder,
                **BATCHES[model_name],
                adam_beta2=0.99,
                max_steps=steps,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=task.train_dataset,
            processing_class=AutoTokenizer.from_pretrained(TINY_PATH),
            peft_config=lora,
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
    parser.add_argument("--model", choices=BATCHES, default="tiny")
    options = parser.parse_args()
    for clock, seconds in step_seconds(options.steps, options.probes, options.model).items():
        on, off = seconds[4::2], seconds[5::2]  # the first ones warm up
        for name, values in (("on", on), ("off", off)):
            low, median, high = statistics.quantiles(values, n=4)
            print(f"{clock:4} s, probes {name:3}  median {median:.3f}  quartiles {low:.3f} .. {high:.3f}")
        low, median, high = statistics.quantiles([a / b for a, b in zip(on, off, strict=False)], n=4)
        print(f"{clock:4} ratio of {len(off)} pairs  median {median:.3f}  quartiles {low:.3f} .. {high:.3f}")


if __name__ == "__main__":
    main()

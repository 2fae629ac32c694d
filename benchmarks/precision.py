"""Compares probe values in bf16 with fp32, on the same rollouts, adapter and optimizer state at every step.

    OMP_NUM_THREADS=1 python benchmarks/precision.py [--steps 20] [--model wide]

An fp32 run trains LoRA of rank 16 on all linear layers. Its rollouts, adapters and Adam states are kept, and each other
precision measures the same steps again. In every run the frozen weights are rounded to bf16, as in published
checkpoints, so that the policies differ only in arithmetic. `wide` is a Qwen2 with random weights, hidden size 512 and
6 layers. It is rewarded for digits, because it cannot solve sums.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from peft import LoraConfig
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback, set_seed

from rl_training import DrGRPOConfig, DrGRPOTrainer
from rl_training.engine.predictions import Predictions
from rl_training.models.load import TINY_PATH, load_tiny
from rl_training.probes import EffectiveSampleSizeProbe, GradientNoiseScaleProbe, SimpleEntropyProbe
from rl_training.tasks.arithmetic import arithmetic

PRECISIONS: dict[str, tuple[torch.dtype, bool]] = {  # frozen weights; autocast
    "fp32": (torch.float32, False),
    "fp32 weights, bf16 autocast": (torch.float32, True),
    "bf16 weights, bf16 autocast": (torch.bfloat16, True),
    "bf16 weights, no autocast": (torch.bfloat16, False),
}
METRICS = ("delta_h/forward", "delta_h/backward", "entropy/token")
RATIOS = ("delta_h/forward_se", "gns/trace")


def share_of_digits(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


Predictions._forget_if_edited = lambda self, weights: None  # type: ignore[method-assign]  # steps begin at given weights, on purpose


class Tape(TrainerCallback):
    """Rollouts, trained parameters and optimizer states: recorded in the first run, replayed in the later ones."""

    def __init__(self) -> None:
        self.rollouts: list[dict[str, Any]] = []
        self.states: list[tuple[dict[str, torch.Tensor], dict[str, Any]]] = []
        self.recording = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if self.recording:
            parameters = {name: p.detach().clone() for name, p in trained.items()}
            self.states.append((parameters, copy.deepcopy(optimizer.state_dict())))
            return
        parameters, optimizer_state = self.states[state.global_step]
        for name, p in trained.items():
            p.data.copy_(parameters[name])
        optimizer.load_state_dict(copy.deepcopy(optimizer_state))


class TapedTrainer(DrGRPOTrainer):
    tape: Tape

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.tape.recording:
            self.tape.rollouts.append(super()._generate_and_score_completions(inputs))
        return dict(self.tape.rollouts[self.state.global_step])


def run_precision(
    model_name: str, precision: str, tape: Tape, steps: int, microbatches: int | None = None
) -> list[dict[str, float]]:
    """Train or replay, and return the log line of each step. Default microbatches: 16 for `tiny`, 8 for `wide`."""
    dtype, autocast = PRECISIONS[precision]
    set_seed(0)
    model, tokenizer = load_tiny()
    if model_name == "wide":
        shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
                 "num_key_value_heads": 4, "layer_types": ["full_attention"] * 6}  # fmt: skip
        model = Qwen2ForCausalLM(Qwen2Config.from_pretrained(TINY_PATH, **shape))
    task = arithmetic()
    with tempfile.TemporaryDirectory() as folder:
        args = DrGRPOConfig(
            folder,
            max_steps=steps,
            learning_rate=1e-3 if model_name == "tiny" else 1e-4,
            lr_scheduler_type="constant",
            per_device_train_batch_size=16 if model_name == "tiny" else 8,
            gradient_accumulation_steps=microbatches or (16 if model_name == "tiny" else 8),
            num_generations=8,
            max_completion_length=36 if model_name == "tiny" else 16,
            use_cpu=not torch.cuda.is_available(),
            bf16=autocast,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = TapedTrainer(
            model.to(torch.bfloat16).to(dtype),
            task.reward if model_name == "tiny" else share_of_digits,
            args,
            train_dataset=task.train_dataset,
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            probes=[SimpleEntropyProbe(), GradientNoiseScaleProbe(), EffectiveSampleSizeProbe()],
        )
        trainer.tape = tape
        trainer.add_callback(tape)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    tape.recording = False
    return [line for line in trainer.state.log_history if "loss" in line]


def compare(exact: list[dict[str, float]], lines: list[dict[str, float]]) -> dict[str, tuple[float, ...]]:
    """Compare each step's values with the exact ones.

    Returns:
        For each of METRICS: rms difference / rms value; then the mean difference and the median and largest absolute
        difference, in standard errors. For each of RATIOS: the smallest and the largest ratio to the exact value.
    """
    numbers: dict[str, tuple[float, ...]] = {}
    for name in METRICS:
        both = [(a, b) for a, b in zip(exact, lines, strict=True) if name in a]
        rows = [(a[name], b[name], a.get(f"{name}_se", math.nan)) for a, b in both]
        value, other, stderr = torch.tensor(rows, dtype=torch.float64).T
        relative = (other - value).square().mean().sqrt() / value.square().mean().sqrt()
        in_errors = (other - value) / stderr
        of_error = in_errors.abs()
        numbers[name] = tuple(float(x) for x in (relative, in_errors.mean(), of_error.median(), of_error.max()))
    for name in RATIOS:
        ratios = [b.get(name, math.nan) / a.get(name, math.nan) for a, b in zip(exact, lines, strict=True)]
        numbers[name] = min(ratios), max(ratios)
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", choices=("tiny", "wide"), default="tiny")
    options = parser.parse_args()
    tape = Tape()
    exact, *others = [run_precision(options.model, precision, tape, options.steps) for precision in PRECISIONS]
    print(f"{options.model}, {options.steps} steps; against fp32")
    for precision, lines in zip(list(PRECISIONS)[1:], others, strict=True):
        print(precision)
        for name, figures in compare(exact, lines).items():
            if name in RATIOS:
                print(f"  {name:24} ratio {figures[0]:.4f} … {figures[1]:.4f}")
            else:
                relative, mean, median, most = figures
                print(
                    f"  {name:24} rms difference / rms value {relative:.4f}; difference / standard error: mean "
                    f"{mean:+.3f}, median {median:.3f}, max {most:.3f}"
                )


if __name__ == "__main__":
    main()

"""Does a bounded step make the learning rate matter less? Runs that were registered before they were made.

    OMP_NUM_THREADS=1 python benchmarks/step_size.py --plan    # what is registered: settings, rules, measures, bar
    OMP_NUM_THREADS=1 python benchmarks/step_size.py           # the runs, a line of OUTPUT/runs.jsonl each
    python benchmarks/step_size.py --table                     # tables and the picture of the runs that are there

step_size_plan.txt is the register. A run that has its line is not repeated: stop, and go on later.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import numpy as np
import torch
from default_task import default_trainer
from peft import LoraConfig
from step_size_tables import draw, pairs, print_tables, read_lines
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from rl_training import DrGRPOTrainer, MeasuredStepProbe, Reading, UserError
from rl_training.engine.context import StepContext
from rl_training.evaluation.policy import CheckpointPolicy
from rl_training.evaluation.responses import Response, batches_of, generate_responses
from rl_training.tasks.arithmetic import arithmetic, worked_examples
from rl_training.tasks.models import load_causal_lm
from rl_training.tasks.reasoning_gym import reasoning_gym
from rl_training.tasks.task import Task
from rl_training.tasks.tiny import TINY_PATH, build_tokenizer, warm_start

ADAPTIVE_TARGET, SHARE = 1e-4, 2e-3
STEPS, RESPONSES, HELD_OUT = 30, 8, 128
RATES = (3e-5, 1.3e-4, 5.5e-4, 2.3e-3, 1e-2)
LOGGED = {"reward": "reward", "entropy": "entropy", "bound/kl": "kl", "bound/learning_rate": "rate"}
SOME = slice(0, None, 2)  # of the rates, for the rules that are compared beside


def chains(least: int, most: int) -> Callable[[], Task]:
    return lambda: arithmetic(2048, HELD_OUT, min_operands=least, max_operands=most)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One training: its task, its model, and how it is optimized.

    model       "tiny", "million", or the task of reasoning-gym that a tiny model is warmed up on
    tokens      of a response at most
    iterations  optimizer steps on one rollout
    """

    task: Callable[[], Task]
    tokens: int
    model: str = "tiny"
    prompts: int = 16
    lora: bool = False
    optimizer: str = "adamw"
    iterations: int = 1
    rates: tuple[float, ...] = RATES


GYM: dict[str, dict[str, int]] = {"gcd": {"min_value": 1, "max_value": 60}}  # settings by task of reasoning-gym

SETTINGS = {
    "few_prompts": Setting(chains(4, 6), 30, prompts=8),
    "lora": Setting(chains(6, 8), 38, lora=True),
    "gcd": Setting(lambda: reasoning_gym("gcd", 1500, HELD_OUT, settings=GYM["gcd"]), 10, model="gcd", prompts=32),
    "reuse": Setting(chains(5, 7), 34, iterations=2),
    "muon": Setting(chains(4, 7), 34, optimizer="muon"),
    "sgd": Setting(chains(5, 7), 34, optimizer="sgd", rates=(0.01, 0.1, 1.0, 10.0, 100.0)),
    "million": Setting(chains(4, 6), 30, model="million", rates=RATES[SOME]),
}
RULES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "bounded": {"target_kl_share": SHARE},
    "adaptive": {},
    "linear": {"lr_scheduler_type": "linear"},
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of the register."""

    setting: str
    rule: str
    rate: float
    seed: int


def jobs() -> list[Job]:
    """Return all runs in the order in which they are made; one without steps comes first in each setting."""
    untrained = [Job(name, "untrained", 0.0, 0) for name in SETTINGS]
    first = [
        Job(name, rule, rate, 0)
        for name, options in SETTINGS.items()
        for rate in options.rates
        for rule in ("bounded", "fixed")
    ]
    beside = [
        Job(name, rule, rate, 0)
        for rule in ("adaptive", "linear")
        for name, options in SETTINGS.items()
        if options.model != "million"
        for rate in options.rates[SOME]
    ]
    return [*untrained, *first, *beside, *(dataclasses.replace(job, seed=1) for job in first)]


class KeepsReading(MeasuredStepProbe):
    """The probe, with what it says of a step kept before the optimizer makes the next one."""

    def measure(self, ctx: StepContext, state: Any) -> Reading:
        self.reading = super().measure(ctx, state)
        return self.reading


class AdaptiveRate(TrainerCallback):
    """torchrl's KLAdaptiveLR, by what `measured` says of the step before."""

    def __init__(self, probe: KeepsReading, rates: tuple[float, ...]) -> None:
        self.probe, self.rate, self.least, self.most = probe, 0.0, rates[0] / 3.0, rates[-1]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.rate = self.rate or args.learning_rate
        kl = self.probe.reading.measured["measured/kl"].value
        if kl > 2.0 * ADAPTIVE_TARGET:
            self.rate = max(self.least, self.rate / 1.5)
        elif 0.0 < kl < ADAPTIVE_TARGET / 2.0:
            self.rate = min(self.most, self.rate * 1.5)
        for group in optimizer.param_groups:
            group["lr"] = self.rate


class Curves(TrainerCallback):
    """What a run logs at each step: reward, entropy, and how the step was bounded."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, short in LOGGED.items():
            if name in logs:
                self.values.setdefault(short, []).append(float(f"{logs[name]:.4g}"))


@functools.cache
def task_of(make: Callable[[], Task]) -> Task:
    return make()


def model_folder(name: str, output: Path) -> Path:
    """Return the folder of a setting's first model, which is made where it is not there."""
    folder = TINY_PATH if name == "tiny" else output / "models" / name
    if (folder / "config.json").is_file():
        return folder
    if name == "million":
        tokenizer = build_tokenizer()
        config = Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=160, intermediate_size=480, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
            initializer_range=0.05, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        warm_start(model, tokenizer, worked_examples(0), 250)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    else:
        asked = ["--task", name, "--settings", json.dumps(GYM[name]), "--output", str(folder)]
        subprocess.run([sys.executable, "-m", "rl_training.tasks.tiny", *asked], check=True)
    return folder


def trainer_of(setting: Setting, task: Task, job: Job, folder: Path, scratch: str) -> DrGRPOTrainer:
    """Return the trainer of a run, in one microbatch."""
    probe = KeepsReading()
    optimizer = {"sgd": {"optim": "sgd"}}.get(setting.optimizer, {})
    trainer = default_trainer(
        scratch, [probe] if job.rule == "adaptive" else [], STEPS, job.rate, job.seed, task=task, model_folder=folder,
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if setting.lora else None,
        per_device_train_batch_size=setting.prompts * RESPONSES, gradient_accumulation_steps=1,
        num_iterations=setting.iterations, max_completion_length=setting.tokens, **optimizer, **RULES[job.rule],
    )  # fmt: skip
    if setting.optimizer == "muon":
        matrices = [weight for name, weight in trainer.model.named_parameters() if "_proj.weight" in name]
        trainer.model.requires_grad_(False)
        for weight in matrices:
            weight.requires_grad_(True)
        trainer.optimizer = torch.optim.Muon(matrices, job.rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    if job.rule == "adaptive":
        trainer.add_callback(AdaptiveRate(probe, setting.rates))
    return trainer


def evaluate(setting: Setting, task: Task, model: Any, tokenizer: Any, first: Any) -> dict[str, Any]:
    """Return the measures of a model on held-out prompts, and ten responses."""
    policy = CheckpointPolicy(model.eval(), tokenizer, None, 1.0, setting.tokens)
    [responses] = list(generate_responses(policy, task, batches_of(range(HELD_OUT), RESPONSES, False, 10**6), 0, {}))
    rewards = torch.tensor([response.reward for response in responses]).view(HELD_OUT, RESPONSES)
    compared = dataclasses.replace(policy, reference=first)
    quarter = batches_of(range(0, HELD_OUT, 4), RESPONSES, False, 10**6)
    [some] = list(generate_responses(compared, task, quarter, 0, {}))
    return {
        "reward": float(rewards.mean()),
        "pass8": float((rewards == 1.0).any(dim=1).float().mean()),
        "length": sum(response.length for response in responses) / len(responses),
        "entropy": mean_over_tokens(some, "entropies"),
        "kl_to_first": mean_over_tokens(some, "kl"),
        "examples": [task.eval_dataset[r.row]["prompt"] + r.text for r in responses[:: len(responses) // 10][:10]],
    }


def mean_over_tokens(responses: list[Response], name: str) -> float:
    return float(np.concatenate([getattr(response, name) for response in responses]).mean())


def run(job: Job, setting: Setting, output: Path) -> dict[str, Any]:
    """Make one run and return its line."""
    start, task, folder = time.process_time(), task_of(setting.task), model_folder(setting.model, output)
    curves, problem = Curves(), ""
    with tempfile.TemporaryDirectory() as scratch:
        used = dataclasses.replace(job, rule="fixed") if job.rule == "untrained" else job
        trainer = trainer_of(setting, task, used, folder, scratch)
        trainer.add_callback(curves)
        try:
            if job.rule != "untrained":
                trainer.train()
        except UserError as error:
            if "diverged" not in str(error):
                raise
            problem = str(error)
    model = trainer.model
    first = model if setting.lora else load_causal_lm(folder)[0].eval()
    is_finite = all(bool(weight.isfinite().all()) for weight in model.parameters())
    measures = {"reward": 0.0, "pass8": 0.0, "entropy": math.nan, "kl_to_first": math.nan, "length": math.nan}
    if not problem and is_finite:
        measures = evaluate(setting, task, model, trainer.processing_class, first)
    elif not problem:
        problem = "a weight is not finite"
    seconds = time.process_time() - start
    return dataclasses.asdict(job) | measures | {"problem": problem, "seconds": seconds, "curves": curves.values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/step_size"))
    parser.add_argument("--picture", type=Path, default=Path("docs/figures/step_size.png"))
    parser.add_argument("--plan", action="store_true", help="print what is registered and what is left of it")
    parser.add_argument("--table", action="store_true", help="print tables of the runs that are there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = read_lines(options.output)
    if options.table:
        settings = [name for name in SETTINGS if all(pairs(lines, name))]
        if not settings:
            parser.error(f"{options.output} has no setting with a run of fixed and of bounded: make the runs first")
        print_tables(lines, settings)
        draw(lines, settings, options.picture)
        return
    done = {Job(*(line[field.name] for field in dataclasses.fields(Job))) for line in lines}
    todo = [job for job in jobs() if job not in done]
    if options.plan:
        mean = float(np.mean([line["seconds"] for line in lines])) if lines else 12.0
        print(Path(__file__).with_name("step_size_plan.txt").read_text(encoding="utf-8"))
        print(f"{len(jobs())} runs, {len(todo)} are left: about {len(todo) * mean / 3600:.1f} hours of one processor")
        return
    options.output.mkdir(parents=True, exist_ok=True)
    for number, job in enumerate(todo):
        line = run(job, SETTINGS[job.setting], options.output)
        with (options.output / "runs.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{number + 1}/{len(todo)} {job}: {line['reward']:.3f} {line['pass8']:.3f}", flush=True)


if __name__ == "__main__":
    main()

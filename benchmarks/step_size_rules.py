"""The rules that step_size.py compares: each sets the learning rate of every step, or skips steps."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from default_task import default_trainer
from peft import LoraConfig
from step_size_settings import RESPONSES, Setting
from transformers import TrainerCallback

from rl_training import DrGRPOTrainer, MeasuredStepProbe, Reading
from rl_training.engine.context import StepContext
from rl_training.tasks.task import Task

ADAPTIVE_TARGET = 1e-4
CLIPS, SKIPS = (0.01, 0.05, 0.25), (1e-3, 1e-2)  # candidates, tuned on the default task


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a rule changes in a run with a given setting, start rate and seed.

    Args:
        settings: Settings of the trainer.
        duration: Multiplies the setting's number of steps.
        skip_target: PPO's target for the KL since the rollout, nats per token. None skips no step.
    """

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    duration: int = 1
    skip_target: float | None = None


RULES = {
    "untrained": Rule(),
    "fixed": Rule(),
    "bounded": Rule({"target_kl_share": 2e-3}),
    "bounded_3e-3": Rule({"target_kl_share": 3e-3}),
    "bounded_1e-2": Rule({"target_kl_share": 1e-2}),
    "bounded_5x": Rule({"target_kl_share": 2e-3}, duration=5),
    "bounded_1e-2_5x": Rule({"target_kl_share": 1e-2}, duration=5),
    "adaptive": Rule(),
    "linear": Rule({"lr_scheduler_type": "linear"}),
    "prodigy": Rule(),  # the start rate is its d_coef
    "schedule_free": Rule({"optim": "schedule_free_adamw"}),
    **{f"clip_{norm:g}": Rule({"max_grad_norm": norm}) for norm in CLIPS},
    **{f"skip_{target:g}": Rule(skip_target=target) for target in SKIPS},
}
TUNED = ("clip", "skip")  # each stands for the best of clip_… or skip_… on the default task
PACKAGES = {"prodigy": "prodigyopt==1.1.2", "schedule_free": "schedulefree==1.4.1"}  # the package that a rule needs


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of the registered plan."""

    setting: str
    rule: str
    rate: float
    seed: int


def rule_of(name: str, lines: Sequence[Mapping[str, Any]]) -> Rule:
    """Return the rule of this name. For a name in TUNED, return its candidate with the highest mean reward."""
    if name not in TUNED:
        return RULES[name]
    rewards: dict[str, list[float]] = {}
    for line in lines:
        if line["rule"].startswith(f"{name}_"):
            rewards.setdefault(line["rule"], []).append(line["reward"])
    return RULES[max(rewards, key=lambda candidate: fmean(rewards[candidate]))]


class KeepsReading(MeasuredStepProbe):
    """The probe `measured`, which keeps the reading it returns before each optimizer step."""

    def measure(self, ctx: StepContext, state: Any) -> Reading:
        self.reading = super().measure(ctx, state)
        return self.reading


class AdaptiveRate(TrainerCallback):
    """torchrl's KLAdaptiveLR, driven by the KL that `measured` reports for the previous step."""

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


class SkipsSteps(TrainerCallback):
    """PPO's target_kl: once the policy is too far from the one that sampled, skip the rollout's remaining steps.

    KL is the mean over the rollout's tokens of r - 1 - log r, where r is the current probability divided by the
    sampler's. Above 1.5 times the target the gradients are removed, so the optimizer changes neither weights nor
    moments.
    """

    def __init__(self, trainer: DrGRPOTrainer, target: float) -> None:
        self.trainer, self.target = trainer, target

    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        [batch] = self.trainer._buffered_inputs  # a rollout is one microbatch
        completion, is_token = batch["completion_ids"], batch["completion_mask"].bool()
        sequences = torch.cat([batch["prompt_ids"], completion], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        now = self.trainer._get_per_token_logps_and_entropies(model, sequences, mask, completion.size(1))[0]
        log_ratio = (now - batch["old_per_token_logps"])[is_token].double()
        if float((log_ratio.expm1() - log_ratio).mean()) > 1.5 * self.target:
            model.zero_grad(set_to_none=True)


def trainer_of(setting: Setting, task: Task, job: Job, rule: Rule, folder: Path, scratch: str) -> DrGRPOTrainer:
    """Return the trainer of a run, with one microbatch per step."""
    probe, steps = KeepsReading(), rule.duration * setting.steps
    adapter = LoraConfig(r=setting.lora, target_modules="all-linear", task_type="CAUSAL_LM") if setting.lora else None
    optimizer = {"optim": "sgd"} if setting.optimizer == "sgd" else {}
    trainer = default_trainer(
        scratch, [probe] if job.rule == "adaptive" else [], steps, job.rate, job.seed, task=task, model_folder=folder,
        peft_config=adapter, per_device_train_batch_size=setting.prompts * RESPONSES, gradient_accumulation_steps=1,
        num_iterations=setting.iterations, max_completion_length=setting.tokens,
        **optimizer, **setting.training, **rule.settings,
    )  # fmt: skip
    if setting.optimizer == "muon":
        matrices = [weight for name, weight in trainer.model.named_parameters() if "_proj.weight" in name]
        trainer.model.requires_grad_(False)
        for weight in matrices:
            weight.requires_grad_(True)
        trainer.optimizer = torch.optim.Muon(matrices, job.rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    if job.rule == "prodigy":
        trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
        prodigy = importlib.import_module("prodigyopt").Prodigy
        trainer.optimizer = prodigy(trained, lr=1.0, betas=(0.9, 0.99), d_coef=job.rate)
    if job.rule == "adaptive":
        trainer.add_callback(AdaptiveRate(probe, setting.rates))
    if rule.skip_target is not None:
        trainer.add_callback(SkipsSteps(trainer, rule.skip_target))
    return trainer


def set_to_evaluate(trainer: DrGRPOTrainer) -> None:
    """Switch a schedule-free optimizer to its averaged weights. Other optimizers stay as they are."""
    if trainer.args.optim == "schedule_free_adamw":
        trainer.optimizer.eval()

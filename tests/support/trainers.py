"""Trainers on the shipped model and task, with quick steps."""

from __future__ import annotations

import contextlib
import functools
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from rl_training import DrGRPOConfig, DrGRPOTrainer, Probe
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.models.load import load_tiny
from rl_training.probes import BUILT_IN
from rl_training.tasks.arithmetic import arithmetic


def graded(completions: list[str], **kwargs: Any) -> list[float]:
    """Return rewards that differ within every prompt, even for few and short responses, so there is a gradient."""
    return [float(sum(map(ord, c)) % 7) for c in completions]


L_MAX = 12  # maximum tokens per response; half of the responses end before
# A step of two microbatches with one prompt each and short responses, for tests that need no more.
FEW: dict[str, Any] = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_length": 8, "reward": graded,
}  # fmt: skip
# An epoch over twelve prompts: a step of four microbatches, and a last step of two.
SHORT_LAST_STEP: dict[str, Any] = {
    "steps_per_generation": 2, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 8, "max_steps": -1,
    "num_train_epochs": 1, "max_completion_length": 8, "reward": graded,
}  # fmt: skip
# Two microbatches of two prompts each.
SHAPE: dict[str, Any] = FEW | {"max_completion_length": L_MAX, "per_device_train_batch_size": 8, "learning_rate": 3e-3}
SGD = {"optim": "sgd", "learning_rate": 0.3}
# Options with which a probe measures everything it can within few steps.
ALL_OF: dict[str, dict[str, Any]] = {
    "simple": {"per_sequence": True}, "ground_truth": {"every": 1, "sequences": 8}, "gns": {"split_prompts": 1},
    "sampler": {"numerics": True},
}  # fmt: skip
NEED_FOLDS = ("interventions", "token_classes")  # they need eight folds
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1, "task_type": "CAUSAL_LM"}


def every_probe(**simple_options: Any) -> list[Probe]:
    """Return one probe of each kind that measures everything it can, except those that need eight folds."""
    options = ALL_OF | {"simple": ALL_OF["simple"] | simple_options}
    return [probe(**options.get(name, {})) for name, probe in BUILT_IN.items() if name not in NEED_FOLDS]


@contextlib.contextmanager
def each_pass_is_timed(attachment: Any) -> Iterator[None]:
    """Assert that the time of every pass of the trainer's policy, other than training's own, is among the costs."""
    score, is_timed = TrainerPolicy.score_rollout, []

    def watched(policy: TrainerPolicy, *args: Any, **options: Any) -> Any:
        is_timed.append(attachment.driver.costs._is_running)
        return score(policy, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainerPolicy, "score_rollout", watched)
        yield
    assert all(is_timed)


@functools.cache
def _task() -> Any:
    return arithmetic(num_train=256, num_eval=8)


def trainer_maker(folder: Path) -> Callable[..., GRPOTrainer]:
    """Return a function that makes trainers: 2 steps of 4 microbatches with 2 prompts x 4 responses."""

    def make(
        trainer_class: type[GRPOTrainer] = DrGRPOTrainer,
        *,
        config_class: type[GRPOConfig] = DrGRPOConfig,
        probes: Any = None,
        records: Any = None,
        interventions: Any = (),
        buffer: Any = None,
        dtype: torch.dtype | None = torch.float32,
        model: Any = None,
        optimizers: Any = (None, None),
        peft_config: Any = None,
        reward: Any = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        trainer_arguments: dict[str, Any] | None = None,  # further arguments of the trainer
        **settings: Any,
    ) -> GRPOTrainer:
        task = _task()
        policy, tokenizer = load_tiny()
        defaults: dict[str, Any] = {
            "output_dir": str(folder / "state"),
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 4,
            "num_generations": 4,
            "max_completion_length": L_MAX,
            "max_steps": 2,
            "learning_rate": 3e-4,
            "weight_decay": 0.1,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        extra = {"probes": probes or [], "records": records, "interventions": interventions, "buffer": buffer}
        if peft_config is not None:  # TRL does so since 1.15; before, adapters begin with unrepeatable weights
            set_seed(settings.get("seed", 42))
        trainer = trainer_class(
            model=(model or policy) if dtype is None else (model or policy).to(dtype),
            reward_funcs=reward or task.reward,
            args=config_class(**{**defaults, **settings}),
            train_dataset=train_dataset or task.train_dataset,
            processing_class=processing_class or tokenizer,
            optimizers=optimizers,
            peft_config=peft_config,
            **(extra if issubclass(trainer_class, DrGRPOTrainer) else {}),
            **(trainer_arguments or {}),
        )
        trainer.remove_callback(PrinterCallback)  # it would print hundreds of log lines
        return trainer

    return make


def trained_weights(trainer: Any) -> Tensor:
    """Return all trained weights as one vector."""
    return torch.cat([p.detach().double().flatten() for p in trainer.model.parameters() if p.requires_grad])


def logged_numbers(trainer: Any) -> list[dict[str, Any]]:
    """Return what was logged at each step, except values that depend on the clock."""
    clock = ("seconds", "step_time", "fraction_of_step", "runtime", "per_second", "train_loss", "total_flos")
    return [{k: v for k, v in row.items() if not k.endswith(clock)} for row in trainer.state.log_history]


class Outcome(NamedTuple):
    """The outcome of a training. No probe may change a bit of it."""

    weights: dict[str, Tensor]
    random_numbers: dict[str, Tensor]  # the state of each random number generator
    logs: list[dict[str, Any]]  # TRL's log lines on losses, rewards and responses, by step


def outcome(trainer: GRPOTrainer) -> Outcome:
    """Train, and return the outcome."""
    trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    streams = {"torch": torch.random.get_rng_state(), "numpy": torch.tensor(np.random.get_state()[1].astype(np.int64))}
    streams["python"] = torch.tensor(random.getstate()[1])
    of_trl = ("loss", "reward", "completions")
    logs = [{k: v for k, v in row.items() if k.startswith(of_trl)} for row in trainer.state.log_history[:-1]]
    return Outcome(weights, streams, logs)


@functools.cache
def outcome_without_probes(
    trainer_class: type[GRPOTrainer] = DrGRPOTrainer, *, lora: bool = False, **settings: Any
) -> Outcome:
    """Return the outcome of a training without probes. Tests with the same settings in a process share one training.

    Args:
        lora: Train an adapter with LoraConfig(**LORA).
        settings: Settings of trainer_maker's trainers. They must be hashable.
    """
    with tempfile.TemporaryDirectory() as folder:
        peft_config = LoraConfig(**LORA) if lora else None
        return outcome(trainer_maker(Path(folder))(trainer_class, peft_config=peft_config, **settings))


def differing(first: Outcome, other: Outcome) -> list[str]:
    """Return the names of everything that differs in any bit; empty if the probes changed nothing."""
    assert first.weights.keys() == other.weights.keys()
    tensors = [(a.weights | a.random_numbers) for a in (first, other)]
    names = [name for name in tensors[0] if not torch.equal(tensors[0][name], tensors[1][name])]
    return names + ["logs"] * (first.logs != other.logs)

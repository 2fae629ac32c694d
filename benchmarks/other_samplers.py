"""Samplers that are not the trainer: older or rounded weights, noise on the logits, a cut distribution. For benchmarks.

A run of the default task, 16 prompts × 8 responses a step, with one of them: by itself, or frozen at one state, where
each batch is drawn anew and weights and moments are put back before the next.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from default_task import default_trainer
from torch import Tensor
from transformers import TrainerCallback

from rl_training import DrGRPOTrainer, Probe
from rl_training.hosts.trl.lagging_sampler import LaggingSampler
from rl_training.hosts.trl.policy import TrainerPolicy

LR, BETAS, EPS = 3e-4, (0.9, 0.99), 1e-8
Named = dict[str, Tensor]


def to_bits(bits: int, weights: Named) -> Named:
    """Returns weights with so many bits an entry and a scale of each row, as fp32; vectors as they are."""
    largest = 2 ** (bits - 1) - 1
    scales = {name: (w.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-12) for name, w in weights.items()}
    return {name: w if w.dim() < 2 else (w / scales[name]).round() * scales[name] for name, w in weights.items()}


def to_bf16(weights: Named) -> Named:
    return {name: w.bfloat16().float() for name, w in weights.items()}


def with_noise(deviation: float, logits: Tensor, hidden: Tensor) -> Tensor:
    """Returns logits with noise of this deviation: a fixed function of the hidden state that nothing else resembles."""
    draw = torch.Generator().manual_seed(5)
    directions = 30.0 * torch.randn(hidden.shape[-1], logits.shape[-1], generator=draw)
    phases = 2.0 * math.pi * torch.rand(logits.shape[-1], generator=draw)
    return logits + deviation * math.sqrt(2.0) * torch.cos(hidden @ directions + phases)


def cut(top_p: float, logits: Tensor, hidden: Tensor) -> Tensor:
    """Returns logits without the tokens beyond the likeliest that hold this share."""
    chances, order = logits.softmax(-1).sort(-1, descending=True)
    beyond = (chances.cumsum(-1) - chances >= top_p).gather(-1, order.argsort(-1))
    return logits.masked_fill(beyond, -math.inf)


COPIES: dict[str, Callable[[Named], Named]] = {"bf16": to_bf16} | {
    f"int{bits}": functools.partial(to_bits, bits) for bits in (8, 5, 4)
}
HEADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "noise-.6": functools.partial(with_noise, 0.6),
    "top-p-.95": functools.partial(cut, 0.95),
}


class OtherSampler(LaggingSampler):
    """Samples with a copy (a name of COPIES) of the policy's weights or of given ones, or another head (of HEADS)."""

    def __init__(self, trainer: DrGRPOTrainer, name: str, fixed: Named | None = None) -> None:
        super().__init__(trainer, TrainerPolicy(trainer, call_head=name in HEADS), 1)
        self.policy.scorer.verify()  # before the head has a hook
        self.name, self.fixed = name, fixed

    def weights(self) -> Named:
        given = self.fixed or {name: p.detach() for name, p in self.trainer.model.named_parameters()}
        return COPIES.get(self.name, dict)(given)

    def generate(self, original: Callable[[list], tuple], prompts: list) -> tuple:
        if self.name not in HEADS:
            return super().generate(original, prompts)
        head = self.trainer.model.get_output_embeddings()
        hook = head.register_forward_hook(lambda _, inputs, logits: HEADS[self.name](logits, inputs[0]))
        try:
            return super().generate(original, prompts)
        finally:
            hook.remove()


class Frozen(TrainerCallback):
    """Keeps the weights and the optimizer's state before every step; or puts a state back before each step."""

    def __init__(self, state: tuple[Named, dict[str, Any]] | None = None) -> None:
        self.state = state
        self.weights: list[Named] = []
        self.optimizers: list[dict[str, Any]] = []
        self.moments: list[dict[str, dict[str, Tensor]]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self.state is None:
            self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
            self.optimizers.append(copy.deepcopy(optimizer.state_dict()))
            self.moments.append({name: copy.deepcopy(optimizer.state[p]) for name, p in model.named_parameters()
                                 if p in optimizer.state})  # fmt: skip
            return
        for name, p in model.named_parameters():
            p.data.copy_(self.state[0][name])
        optimizer.load_state_dict(copy.deepcopy(self.state[1]))

    def step(self, gradient: Named, state: int = -1) -> Named:
        """Returns the step that AdamW would make of a gradient at a kept state, clipped at a norm of 1."""
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))
        clip, made = min(1.0, 1.0 / (norm + 1e-6)), {}
        for name, moments in self.moments[state].items():
            number, g = float(moments["step"]) + 1, clip * gradient[name]
            first = (BETAS[0] * moments["exp_avg"] + (1 - BETAS[0]) * g) / (1 - BETAS[0] ** number)
            second = (BETAS[1] * moments["exp_avg_sq"] + (1 - BETAS[1]) * g.square()) / (1 - BETAS[1] ** number)
            made[name] = -LR * first / (second.sqrt() + EPS)
        return made


def trainer_of(
    folder: str | Path, probes: Sequence[Probe], max_steps: int, sampler: str, fixed: Named | None = None, **more: Any
) -> DrGRPOTrainer:
    """Returns a trainer whose sampler lags N steps, `sampler` being stale-N, or is one of COPIES or HEADS."""
    lags = sampler.startswith("stale") and fixed is None
    shape = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 8}
    lag = int(sampler.partition("-")[2]) if lags else 1
    made = default_trainer(folder, probes, max_steps, sampler_lag=lag, **shape | more)
    if not lags:
        made.lagging_sampler = OtherSampler(made, sampler, fixed)
    return made

"""Samplers that differ from the trained policy: older or rounded weights, noisy logits, a truncated distribution.

Tests use them in runs of the default task with 16 prompts × 8 responses a step. A run either trains normally,
or is frozen at one state: each step draws a new batch, and weights and moments are restored before the next step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from default_task import default_trainer
from torch import Tensor
from transformers import TrainerCallback

from rl_training import DrGRPOTrainer, Probe
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.policy.rollout import as_rollout

LR, BETAS, EPS = 3e-4, (0.9, 0.99), 1e-8
Named = dict[str, Tensor]


def to_bits(bits: int, weights: Named) -> Named:
    """Round matrices to `bits` bits per entry with one scale per row, and return them as fp32. Vectors stay exact."""
    largest = 2 ** (bits - 1) - 1
    scales = {name: (w.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-12) for name, w in weights.items()}
    return {name: w if w.dim() < 2 else (w / scales[name]).round() * scales[name] for name, w in weights.items()}


def to_bf16(weights: Named) -> Named:
    return {name: w.bfloat16().float() for name, w in weights.items()}


def with_noise(deviation: float, logits: Tensor, hidden: Tensor) -> Tensor:
    """Return logits plus noise of this standard deviation, a fixed pseudorandom function of the hidden state."""
    draw = torch.Generator().manual_seed(5)
    directions = 30.0 * torch.randn(hidden.shape[-1], logits.shape[-1], generator=draw)
    phases = 2.0 * math.pi * torch.rand(logits.shape[-1], generator=draw)
    return logits + deviation * math.sqrt(2.0) * torch.cos(hidden @ directions + phases)


def truncate_top_p(top_p: float, logits: Tensor, hidden: Tensor) -> Tensor:
    """Return logits with all tokens outside the top-p nucleus set to −inf."""
    chances, order = logits.softmax(-1).sort(-1, descending=True)
    beyond = (chances.cumsum(-1) - chances >= top_p).gather(-1, order.argsort(-1))
    return logits.masked_fill(beyond, -math.inf)


COPIES: dict[str, Callable[[Named], Named]] = {"bf16": to_bf16} | {
    f"int{bits}": functools.partial(to_bits, bits) for bits in (8, 5, 4)
}
HEADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "noise-.6": functools.partial(with_noise, 0.6),
    "top-p-.95": functools.partial(truncate_top_p, 0.95),
}


@contextlib.contextmanager
def pointing_to(model: torch.nn.Module, weights: Named) -> Iterator[None]:
    """Point parameters to other tensors inside the context. Their own tensors are never written to."""
    parameters = {name: model.get_parameter(name) for name in weights}
    originals = {name: param.data for name, param in parameters.items()}
    try:
        for name, param in parameters.items():
            param.data = weights[name]
        yield
    finally:
        for name, param in parameters.items():
            param.data = originals[name]


class OtherSampler:
    """A `rollout_func` for TRL that samples from a different policy, and returns that policy's log-probabilities.

    Args:
        name: A name in COPIES changes the weights before sampling, a name in HEADS changes the logits. Any other name
            changes neither.
        fixed: The weights to sample with. None samples with the policy's current weights.
    """

    def __init__(self, name: str, fixed: Named | None = None) -> None:
        self.name, self.fixed = name, fixed

    def __call__(self, prompts: list, trainer: DrGRPOTrainer) -> dict[str, Any]:
        policy = TrainerPolicy(trainer, call_head=self.name in HEADS)
        policy.scorer.full_logits_reason()  # before the head has a hook
        weights = self.fixed or {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
        with pointing_to(trainer.model, COPIES.get(self.name, dict)(weights)), self._changed_head(trainer):
            prompt_ids, *images = trainer._tokenize_prompts(prompts)
            completion_ids, _ = trainer._generate_single_turn(prompt_ids, *images, trainer.num_generations)
            rows = ([torch.tensor(ids, device=trainer.accelerator.device) for ids in part]
                    for part in (prompt_ids, completion_ids))  # fmt: skip
            rollout = as_rollout(*rows, range(len(prompts)), trainer._tokenizer.pad_token_id)
            logps = policy.score_rollout(rollout).logps
        said = [row[: len(ids)].tolist() for row, ids in zip(logps, completion_ids, strict=True)]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": said}

    @contextlib.contextmanager
    def _changed_head(self, trainer: DrGRPOTrainer) -> Iterator[None]:
        if self.name not in HEADS:
            yield
            return
        head = trainer.model.get_output_embeddings()
        hook = head.register_forward_hook(lambda _, inputs, logits: HEADS[self.name](logits, inputs[0]))
        try:
            yield
        finally:
            hook.remove()


class StateKeeper(TrainerCallback):
    """Saves the weights and the optimizer's state before every step, or restores a given state before every step."""

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
        """Return AdamW's step for a gradient at a saved state, with the gradient clipped to norm 1."""
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
    """Return a trainer whose responses come from a sampler in COPIES or HEADS, or from the weights `fixed`.

    `sampler` can be any other name if `fixed` is given, such as "stale-N". "itself" without `fixed` samples from the
    policy, which can then also be asked for fresh responses.
    """
    shape = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 8}
    other = None if sampler == "itself" and fixed is None else OtherSampler(sampler, fixed)
    return default_trainer(folder, probes, max_steps, rollout_func=other, **shape | more)

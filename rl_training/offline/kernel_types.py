"""What a kernel is asked for, and the step that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rl_training.engine.batch import Rollout

Source = Literal["own", "fixed"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class KernelSettings:
    """`kernel` of the configuration."""

    memory_gb: float = 8.0  # for rows that are held and rows that stream by
    dtype: str = "float32"  # of the held rows; bfloat16 halves them, and costs 2e-4 of the kernel's norm
    microbatch_size: int = 32  # sequences in a forward; hooks keep as many fp32 gradients
    source: Source = "own"  # of the kernel's E: the analysis's own, or texts that stay over checkpoints
    store_gradients: bool = False
    sketch_buckets: int = 512
    sketch_repeats: int = 8
    sketch_seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"kernel.dtype={self.dtype}: choose float32 or bfloat16")
        if self.source not in get_args(Source):
            raise ValueError(f"kernel.source={self.source}: choose own or fixed")
        if self.memory_gb <= 0:
            raise ValueError(f"kernel.memory_gb={self.memory_gb} must be positive")


@dataclass(frozen=True)
class KernelInputs:
    """What is asked of a checkpoint: all sequences of all processes, on each of them."""

    evaluation: Rollout  # E, N_E sequences
    logp_weights: Tensor  # (N_E, T), w: x̄ is the mean over E of Σ_k w_k ∂log π(t_k) + u_k ∂h_k
    entropy_weights: Tensor  # (N_E, T), u
    update: Rollout  # U, N_U sequences with their advantages
    max_length: int  # L of the loss


@dataclass(frozen=True)
class Ranks:
    """The processes that share the work."""

    rank: int = 0
    count: int = 1
    wait: Callable[[], None] = lambda: None


ALONE = Ranks()


@dataclass(frozen=True)
class KernelStep:
    """The checkpoint's next step, known from U's batch gradient."""

    gradient: Tensor  # (P,), g, before clipping
    entropy_gradient: Tensor  # (P,), x̄
    clip: float
    root: Tensor  # (P,), √M
    update: Tensor  # (3, P), δθ by cause
    max_grad_norm: float = math.inf

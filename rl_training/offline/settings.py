"""The settings of a checkpoint analysis and their checks, without importing torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

Overlap = Literal["forbidden", "allowed", "wanted"]
Source = Literal["own", "fixed"]


@dataclass(frozen=True)
class Evaluation:
    """E: its prompts (drawn uniformly from `source`, or these rows of the training set), and responses to each."""

    prompts: int = 256
    responses: int = 1
    source: Literal["train", "eval"] | Sequence[int] = "train"
    overlap: Overlap = "allowed"
    seed: int = 0

    @property
    def num_sequences(self) -> int:
        return (self.prompts if isinstance(self.source, str) else len(self.source)) * self.responses


@dataclass(frozen=True)
class UpdateConfig:
    """U: its prompts, with as many responses to each as in the run, filtered or not."""

    prompts: int = 32
    filtered: bool = False
    seed: int = 1


@dataclass(frozen=True)
class FirstOrderSettings:
    enabled: bool = True


@dataclass(frozen=True)
class TruthSettings:
    enabled: bool = True
    odd: bool = True
    etas: Sequence[float] = (1.0,)


@dataclass(frozen=True)
class Memory:
    """Per process: sequences in a forward and backward, sequences generated at once, folds in host memory."""

    microbatch_size: int = 32
    generation_size: int = 128
    offload: bool = False


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
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"kernel.dtype={self.dtype}: choose float32 or bfloat16")
        if self.source not in get_args(Source):
            raise ValueError(f"kernel.source={self.source}: choose own or fixed")
        if self.memory_gb <= 0:
            raise ValueError(f"kernel.memory_gb={self.memory_gb} must be positive")


@dataclass(frozen=True)
class Settings:
    """Everything that a checkpoint analysis is asked for."""

    evaluation: Evaluation = field(default_factory=Evaluation)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    first_order: FirstOrderSettings = field(default_factory=FirstOrderSettings)
    truth: TruthSettings = field(default_factory=TruthSettings)
    conditioning: bool = True
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        _refuse_nonsense(self)


def refuse_less(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value} must be a whole number, at least {least}")


def refuse_learning_rate(rate: object) -> None:
    """Raises ValueError for a learning rate that no step is made with; None is the checkpoint's own."""
    if rate is not None and not (type(rate) in (int, float) and 0 < rate < math.inf):  # type: ignore[operator]
        why = " (with 0 there is no step)" if rate == 0 else ""
        raise ValueError(f"learning_rate={rate} must be a number above 0, or null for the checkpoint's own{why}")


def _refuse_nonsense(settings: Settings) -> None:
    e, u, memory = settings.evaluation, settings.update, settings.memory
    for name, value, least in (
        ("evaluation.prompts", e.prompts, 2), ("evaluation.responses", e.responses, 1), ("evaluation.seed", e.seed, 0),
        ("update.prompts", u.prompts, 1), ("update.seed", u.seed, 0),
        ("memory.microbatch_size", memory.microbatch_size, 1), ("memory.generation_size", memory.generation_size, 1),
    ):  # fmt: skip
        refuse_less(name, value, least)
    if e.overlap not in get_args(Overlap):
        raise ValueError(f"evaluation.overlap={e.overlap}: choose from {', '.join(get_args(Overlap))}")
    if isinstance(e.source, str) and e.source not in ("train", "eval"):
        raise ValueError(f"evaluation.source={e.source}: choose train, eval, or a list of rows of the training set")
    if any(not eta > 0 for eta in settings.truth.etas):
        raise ValueError(f"truth.etas={list(settings.truth.etas)}: give multiples of the step above 0; -1 is truth.odd")
    if not settings.first_order.enabled and not settings.truth.enabled:
        raise ValueError("neither prediction nor truth is asked for: set first_order.enabled or truth.enabled to true")

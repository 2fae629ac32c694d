"""The settings of a checkpoint analysis, as in conf/offline.yaml. This module does not import torch.

Each class checks its values and names them in errors as the command does, `update.prompts`. All raise UserError.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from rl_training.errors import UserError
from rl_training.options import check_choice, check_flag, check_list, check_positive, check_whole

LEVELS = ("none", "minimal", "standard", "detailed", "debug")
MOST_BUCKETS = 2**20  # of a sketch


def check_name(name: str) -> None:
    """Raise UserError unless an analysis of this name can have a folder of this name."""
    if not re.fullmatch(r"[\w=+-][\w.,=+-]*", name):
        raise UserError(f"name={name} names a folder in RUN/offline: use only letters, digits and . = + - _")


@dataclass(frozen=True)
class EvaluationSettings:
    """E: its prompts, and the responses to each. `source` is a split to draw from, or rows of the training set."""

    prompts: int = 256
    responses: int = 1
    source: Literal["train", "eval"] | Sequence[int] = "train"
    overlap: str = "allowed"  # forbidden | allowed | wanted
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("evaluation.prompts", self.prompts, 2)
        check_whole("evaluation.responses", self.responses, 1)
        check_whole("evaluation.seed", self.seed, 0)
        check_choice("evaluation.overlap", self.overlap, ("forbidden", "allowed", "wanted"))
        if isinstance(self.source, str) and self.source in ("train", "eval"):
            return
        if not isinstance(self.source, Sequence) or isinstance(self.source, str) or not self.source:
            raise UserError(
                f"evaluation.source={self.source}: choose train, eval, or a list of rows of the training set"
            )
        for row in self.source:
            check_whole("evaluation.source", row, 0)
        if self.num_sequences < 2:
            raise UserError(
                "evaluation.source is one row with one response: each is compared with the others, so give "
                "evaluation.responses=2 or more, or more rows"
            )

    @property
    def num_prompts(self) -> int:
        return self.prompts if isinstance(self.source, str) else len(self.source)

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.responses


@dataclass(frozen=True)
class UpdateSettings:
    """U: its prompts. The number of responses to each is the run's."""

    prompts: int = 32
    filtered: bool = False  # keep only prompts that training's filter accepts
    seed: int = 1

    def __post_init__(self) -> None:
        check_whole("update.prompts", self.prompts, 2)  # error bars leave out one prompt at a time
        check_whole("update.seed", self.seed, 0)
        _check_flags("update", self)


@dataclass(frozen=True)
class FirstOrderSettings:
    """The first-order prediction."""

    enabled: bool = True

    def __post_init__(self) -> None:
        _check_flags("first_order", self)


@dataclass(frozen=True)
class TruthSettings:
    """The measurement of the entropy change that the step really makes."""

    enabled: bool = True
    odd: bool = True  # also measure the step backwards, which removes the second order
    etas: Sequence[float] = (1.0,)  # lengths of the step, as multiples of it

    def __post_init__(self) -> None:
        _check_flags("truth", self)
        check_list("truth.etas", self.etas)
        if not self.etas:
            raise UserError(
                "truth.etas=[] measures no step: give [1.0], or switch the measurement off, truth.enabled=false"
            )
        for eta in self.etas:
            check_positive("truth.etas", eta, ": a multiple of the step; truth.odd makes the step back")


@dataclass(frozen=True)
class MemorySettings:
    """Memory limits of each process."""

    microbatch_size: int = 32  # sequences in a forward and backward
    generation_size: int = 128  # sequences generated at once
    offload: bool = False  # keep the gradients of U's folds in host memory

    def __post_init__(self) -> None:
        check_whole("memory.microbatch_size", self.microbatch_size, 1)
        check_whole("memory.generation_size", self.generation_size, 1)
        _check_flags("memory", self)


@dataclass(frozen=True)
class KernelSettings:
    """The kernel between the sequences of U and E."""

    enabled: bool = False
    memory_gb: float = 8.0  # for the rows held in memory and the microbatch of rows multiplied with them
    dtype: str = "float32"  # of the held rows; bfloat16 halves their memory, with an error of 2e-4 of the kernel's norm
    microbatch_size: int = 32  # sequences in a forward; as many fp32 gradients are held
    source: str = "own"  # texts of E: "own", the analysis's; "fixed", the same at every checkpoint
    store_gradients: bool = False
    sketch_buckets: int = 512
    sketch_repeats: int = 8
    sketch_seed: int = 0

    def __post_init__(self) -> None:
        _check_flags("kernel", self)
        check_positive("kernel.memory_gb", self.memory_gb)
        check_choice("kernel.dtype", self.dtype, ("float32", "bfloat16"))
        check_choice("kernel.source", self.source, ("own", "fixed"))
        check_whole("kernel.microbatch_size", self.microbatch_size, 1)
        check_whole("kernel.sketch_buckets", self.sketch_buckets, 1)
        if self.sketch_buckets > MOST_BUCKETS:
            raise UserError(f"kernel.sketch_buckets={self.sketch_buckets} must be at most {MOST_BUCKETS}")
        if self.sketch_buckets & (self.sketch_buckets - 1):
            larger = 1 << self.sketch_buckets.bit_length()
            raise UserError(f"kernel.sketch_buckets={self.sketch_buckets} must be a power of two: use {larger}")
        check_whole("kernel.sketch_repeats", self.sketch_repeats, 2, ": they give the error bars")


@dataclass(frozen=True)
class SweepSettings:
    """The values to try of each setting; an empty list keeps the analysis's own."""

    evaluation_sizes: Sequence[int] = ()  # numbers of sequences of E, at most all of them
    update_seeds: Sequence[int] = ()
    update_prompts: Sequence[int] = ()
    update_filtered: Sequence[bool] = ()

    def __post_init__(self) -> None:
        for name, least in (("evaluation_sizes", 2), ("update_prompts", 2), ("update_seeds", 0)):
            check_list(f"sweep.{name}", getattr(self, name))
            for value in getattr(self, name):
                check_whole(f"sweep.{name}", value, least)
        check_list("sweep.update_filtered", self.update_filtered)
        for value in self.update_filtered:
            check_flag("sweep.update_filtered", value)

    @property
    def updates(self) -> bool:
        return bool(self.update_seeds or self.update_prompts or self.update_filtered)


@dataclass(frozen=True)
class LogSettings:
    """The log that an analysis writes in addition to its results."""

    level: str = "standard"
    sequences: bool = True  # texts, at levels detailed and debug
    tokens: bool = True  # at level debug
    raw_tensors: bool = True  # at level debug
    compress: bool = True
    directory: str | None = None  # replaces the log folder of the analyses

    def __post_init__(self) -> None:
        check_choice("log.level", self.level, LEVELS)
        _check_flags("log", self)

    def reaches(self, level: str) -> bool:
        return LEVELS.index(self.level) >= LEVELS.index(level)


@dataclass(frozen=True)
class Settings:
    """All settings of a checkpoint analysis, with the defaults of `rl-training analyze`.

    Raises:
        UserError: A value is invalid, or two settings contradict each other.
    """

    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    update: UpdateSettings = field(default_factory=UpdateSettings)
    first_order: FirstOrderSettings = field(default_factory=FirstOrderSettings)
    truth: TruthSettings = field(default_factory=TruthSettings)
    conditioning: bool = True
    memory: MemorySettings = field(default_factory=MemorySettings)
    kernel: KernelSettings = field(default_factory=KernelSettings)
    sweep: SweepSettings = field(default_factory=SweepSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        for group in fields(self):
            kind: Any = group.default_factory  # the group's class; conditioning is no group
            value = getattr(self, group.name)
            if kind is not MISSING and not isinstance(value, kind):
                raise UserError(f"{group.name}={value} must be {kind.__name__}(…): leave it out for the defaults")
        predicts = self.first_order.enabled
        measures = self.truth.enabled
        sweep = self.sweep
        check_flag("conditioning", self.conditioning)
        if not (predicts or measures):
            raise UserError("neither prediction nor truth is enabled: set first_order.enabled or truth.enabled to true")
        if self.kernel.enabled and not predicts:
            raise UserError("kernel.enabled=true needs the entropy gradient: set first_order.enabled=true")
        if (sweep.evaluation_sizes or sweep.updates) and not (predicts and measures):
            raise UserError("a sweep compares prediction with truth: set first_order.enabled and truth.enabled to true")
        responses = self.evaluation.responses
        total = self.evaluation.num_sequences
        unit = responses if total > responses else 1  # with a single prompt, responses are the units
        for size in sweep.evaluation_sizes:
            if size % unit or not 2 * unit <= size <= total:
                raise UserError(
                    f"sweep.evaluation_sizes: {size} sequences are not two or more of E's prompts with all their "
                    f"responses: give multiples of {unit}, from {2 * unit} to {total}"
                )


def _check_flags(group: str, settings: Any) -> None:
    """Raise UserError for a setting of this group that is neither true nor false, and whose default is."""
    for setting in fields(settings):
        if isinstance(setting.default, bool):
            check_flag(f"{group}.{setting.name}", getattr(settings, setting.name))

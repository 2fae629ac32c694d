"""The settings of a checkpoint analysis, as in conf/offline.yaml. This module does not import torch.

job/configuration/checks.py checks the type and range of each value. This module checks that settings fit together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rl_training.errors import UserError

LEVELS = ("none", "minimal", "standard", "detailed", "debug")


@dataclass(frozen=True)
class Evaluation:
    """E: its prompts, and the responses to each. `source` is a split to draw from, or rows of the training set."""

    prompts: int = 256
    responses: int = 1
    source: Literal["train", "eval"] | Sequence[int] = "train"
    overlap: str = "allowed"  # forbidden | allowed | wanted
    seed: int = 0

    @property
    def num_sequences(self) -> int:
        return (self.prompts if isinstance(self.source, str) else len(self.source)) * self.responses


@dataclass(frozen=True)
class UpdateConfig:
    """U: its prompts. The number of responses to each is the run's."""

    prompts: int = 32
    filtered: bool = False  # keep only prompts that training's filter accepts
    seed: int = 1


@dataclass(frozen=True)
class FirstOrderSettings:
    """The first-order prediction."""

    enabled: bool = True


@dataclass(frozen=True)
class TruthSettings:
    """The measurement of the entropy change that the step really makes."""

    enabled: bool = True
    odd: bool = True  # also measure the step backwards, which removes the second order
    etas: Sequence[float] = (1.0,)  # lengths of the step, as multiples of it


@dataclass(frozen=True)
class Memory:
    """Memory limits of each process."""

    microbatch_size: int = 32  # sequences in a forward and backward
    generation_size: int = 128  # sequences generated at once
    offload: bool = False  # keep the gradients of U's folds in host memory


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


@dataclass(frozen=True)
class SweepSettings:
    """The values to try of each setting; an empty list keeps the analysis's own."""

    evaluation_sizes: Sequence[int] = ()  # numbers of sequences of E, at most all of them
    update_seeds: Sequence[int] = ()
    update_prompts: Sequence[int] = ()
    update_filtered: Sequence[bool] = ()

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

    def reaches(self, level: str) -> bool:
        return LEVELS.index(self.level) >= LEVELS.index(level)


@dataclass(frozen=True)
class Settings:
    """All settings of a checkpoint analysis, with the defaults of `rl-training analyze`.

    Raises:
        UserError: Two settings contradict each other.
    """

    evaluation: Evaluation = field(default_factory=Evaluation)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    first_order: FirstOrderSettings = field(default_factory=FirstOrderSettings)
    truth: TruthSettings = field(default_factory=TruthSettings)
    conditioning: bool = True
    memory: Memory = field(default_factory=Memory)
    kernel: KernelSettings = field(default_factory=KernelSettings)
    sweep: SweepSettings = field(default_factory=SweepSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        predicts = self.first_order.enabled
        measures = self.truth.enabled
        sweep = self.sweep
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

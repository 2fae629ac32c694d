"""What a probe sees of an optimizer step: small frozen views of its sequences, gradients, optimizer and processes.

For the letters in shapes see batch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from rl_training.engine.batch import Batch
from rl_training.engine.capabilities import Capabilities
from rl_training.engine.entropy_change import EntropyChange
from rl_training.engine.memory import StepMemory
from rl_training.engine.policy import Policy
from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.sgd import SGDState
from rl_training.mathematics.vectors import Vector


@dataclass(frozen=True)
class OptimizerView:
    """The optimizer before the step: hyperparameters and states, by parameter name.

    `states` is None where there is no formula for the step, with the reason in `reason`.
    """

    states: Mapping[str, AdamWState | SGDState] | None
    max_grad_norm: float  # gradient clipping threshold; inf when there is none
    reason: str = ""


@dataclass(frozen=True)
class Gradients:
    """The training gradient of the step, before clipping."""

    parameters: Mapping[str, nn.Parameter]  # trainable only
    mean: Mapping[str, Tensor]  # over microbatches and ranks, as the optimizer gets it
    rows: Vector | None  # (K, n) of each bucket: the mean gradient of each fold of this rank; only of whole prompts
    microbatch_sq_norms: Tensor | None  # (K, parameters, 2) fp64: |g_k|² and Σ P g_k², in the order of `parameters`


@dataclass(frozen=True)
class Ranks:
    """The processes that train together. `reduce(tensor)` sums a small tensor over them: call it on all or on none."""

    count: int
    reduce: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """One optimizer step on this rank: all gradients are in, the parameters are still old.

    What a probe wants to know beyond these fields it asks of `policy`.
    """

    number: int  # counted from 1: the `step` of the log line that this optimizer step will have
    batch: Batch
    gradients: Gradients
    optimizer: OptimizerView
    policy: Policy
    ranks: Ranks
    capabilities: Capabilities
    memory: StepMemory | None = None  # where a probe needs Need.ENTROPY_CHANGE

    @cached_property
    def entropy_change(self) -> EntropyChange:
        """What the step does to entropy to first order: calculated once for all probes, when it is first asked for."""
        if self.memory is None:
            raise ValueError("step.entropy_change is kept only for a probe with needs = Need.ENTROPY_CHANGE")
        return EntropyChange(self, self.memory)

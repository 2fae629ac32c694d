"""What a probe sees of an optimizer step: small frozen views of its sequences, gradients, optimizer and processes.

For the letters in shapes see batch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from rl_training.engine.batch import Batch
from rl_training.engine.capabilities import Capabilities
from rl_training.engine.entropy_gradients import EntropySettings
from rl_training.engine.policy import Policy
from rl_training.engine.quantities import Quantity
from rl_training.engine.updates import StepsWithoutFolds
from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.sgd import SGDState
from rl_training.mathematics.vectors import Layout, Vector


@dataclass(frozen=True)
class OptimizerView:
    """The optimizer before the step: hyperparameters and states, by parameter name.

    `states` is None where there is no formula for the step, with the reason in `reason`.
    """

    states: Mapping[str, AdamWState | SGDState] | None
    max_grad_norm: float  # gradient clipping threshold; inf when there is none
    reason: str = ""

    @property
    def first_of_adam(self) -> bool:
        """Whether Adam's moments of some parameter that moves are still zero."""
        states = (self.states or {}).values()
        return any(isinstance(state, AdamWState) and state.moves and state.step == 0 for state in states)


@dataclass(frozen=True)
class Gradients:
    """The training gradient of the step, before clipping."""

    parameters: Mapping[str, nn.Parameter]  # trainable only
    mean: Mapping[str, Tensor]  # over microbatches and ranks, as the optimizer gets it
    rows: Vector | None  # (K, n) of each bucket: the mean gradient of each fold of this rank
    why_no_rows: str = ""  # where a probe asks for them
    microbatch_sq_norms: Tensor | None = None  # (K, parameters, 2) fp64: |g_k|² and Σ P g_k², by `parameters`


@dataclass(frozen=True)
class Ranks:
    """The processes that train together. `reduce(tensor)` sums a small tensor over them: call it on all or on none."""

    count: int
    reduce: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class EntropyChange:
    """What the step does to entropy to first order: entropy_change.py has the formulas.

    Vectors lie as `layout` says. Reasons are "" where the thing is there.
    """

    settings: EntropySettings
    layout: Layout
    labels: tuple[str, ...]  # of forward's splits
    why_none: str = ""  # why there is no entropy gradient, and nothing of what follows
    why_no_forward: str = ""  # why no fold can be left out of the step
    why_no_backward: str = ""  # why the step before cannot be multiplied with the entropy gradient
    update: Vector | None = None  # δθ; None where the optimizer's step has no formula
    quantities: Mapping[str, Quantity] = field(default_factory=dict)  # with Need.ENTROPY_CHANGE
    half_step_stderr: Tensor | None = None  # (2,), of ½(forward + backward) from this batch; with Need.ENTROPY_CHANGE
    rows: Vector | None = None  # (K, n) of each bucket: E[T] ∂H_tok of each fold; with Need.ENTROPY_ROWS
    steps_without: StepsWithoutFolds | None = None  # each fold of this rank; where `why_no_forward` is ""


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
    num_folds: int  # of all ranks
    num_sequences: int  # of all ranks
    capabilities: Capabilities
    first_order: EntropyChange | None = None  # where a probe that measures the step needs it

    @property
    def entropy_change(self) -> EntropyChange:
        """`first_order`; ValueError where no probe has asked for it."""
        if self.first_order is None:
            raise ValueError("step.entropy_change is kept only for a probe with needs = Need.ENTROPY_CHANGE")
        return self.first_order

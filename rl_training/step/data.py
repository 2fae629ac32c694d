"""An optimizer step as data: tensors, numbers and limits. What calculates with it, on all processes, is beside it.

For the letters in shapes see policy/rollout.py; for what calculates, step/runtime.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rl_training.optim.leave_one_out import LeaveOneOutUpdates
from rl_training.optim.state import OptimizerView
from rl_training.options import check_flag, check_share, check_whole
from rl_training.parallel.vectors import Layout, Vector
from rl_training.statistics.limit import Limit
from rl_training.step.batch import Batch
from rl_training.step.limits import Limits
from rl_training.step.quantities import Quantity


@dataclass(frozen=True)
class Gradients:
    """The training gradient of the step, before clipping: this process's entries of each parameter, (n,), by name."""

    weights: Mapping[str, Tensor]  # before the step
    mean: Mapping[str, Tensor]  # over microbatches and processes, as the optimizer gets it
    layout: Layout
    rows: Vector | None  # (F, n) of each bucket: the mean gradient of each fold
    rows_limit: Limit | None = None  # where a probe asks for them, and there are none
    # (F + 1, parameters, 2) fp64: |g_k|² and Σ P g_k² of each fold, last of the mean, over all processes
    sq_norms: Tensor | None = None


@dataclass(frozen=True)
class EntropySettings:
    """How the entropy gradient X of a step is estimated.

    responses_per_prompt  of every prompt, the first ones; all for G or more. Baselines use all responses
    per_sequence          compute X per sequence too: a second backward
    error_decay           weight of an optimizer step relative to the next, measured or not, in the average of the
                          variances of single steps
    """

    responses_per_prompt: int = 1
    per_sequence: bool = False
    error_decay: float = 0.5

    def __post_init__(self) -> None:
        check_whole("responses_per_prompt", self.responses_per_prompt, 1)
        check_flag("per_sequence", self.per_sequence)
        check_share("error_decay", self.error_decay, "[0, 1)", "; 0.5 averages over three steps")


@dataclass(frozen=True)
class EntropyPrediction:
    """What the step does to entropy to first order: prediction.py has the formulas.

    Vectors lie as the layout of the step's gradients says. A Limit is None where the thing is there.
    """

    settings: EntropySettings
    labels: tuple[str, ...]  # of forward's splits
    limit: Limit | None = None  # there is no entropy gradient, and nothing of what follows
    other_scores: Limit | None = None  # the same, where the probes' scores of the step's responses are not training's
    forward_limit: Limit | None = None  # no fold can be left out of the step
    backward_limit: Limit | None = None  # the step before cannot be multiplied with the entropy gradient
    reward_limit: Limit | None = None  # the gradient of the reward is no multiple of the step's own; with per_sequence
    intended: Vector | None = None  # δθ by the optimizer's formula; None where its step has none
    update: Vector | None = None  # what the rounding of the weights leaves of it: in fp32 the same vector
    levels: Tensor | None = None  # (F, 3): sequences, entropies and lengths of each fold; where `limit` is None
    quantities: Mapping[str, Quantity] = field(default_factory=dict)  # with Need.ENTROPY_CHANGE
    # (2,), of ½(forward + backward) from this batch, of two folds or more: of a sum; with Need.ENTROPY_CHANGE
    half_step_stderr: Tensor | None = None
    rows: Vector | None = None  # (F, n) of each bucket: E[T] ∂H_tok of each fold; with Need.ENTROPY_ROWS
    steps_without: LeaveOneOutUpdates | None = None  # each fold; where `forward_limit` is None


@dataclass(frozen=True)
class StepData:
    """One optimizer step on this rank: all gradients are in, the parameters are still old."""

    number: int  # counted from 1: the `step` of the log line that this optimizer step will have
    batch: Batch
    gradients: Gradients
    optimizer: OptimizerView
    limits: Limits  # as they are known before the policy is scored anew

"""What a probe sees of an optimizer step: small frozen views of its sequences, gradients, optimizer and processes.

For the letters in shapes see policy/rollout.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rl_training.gradients.fold_reduction import FoldReduction
from rl_training.gradients.folds import FoldGroup
from rl_training.optim.leave_one_out import LeaveOneOutUpdates
from rl_training.optim.state import OptimizerView
from rl_training.options import check_flag, check_share, check_whole
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.vectors import Layout, Vector
from rl_training.policy.policy import Policy
from rl_training.statistics.limit import Limit
from rl_training.step.batch import Batch
from rl_training.step.limits import Limits
from rl_training.step.quantities import Quantity


@dataclass(frozen=True)
class Gradients:
    """The training gradient of the step, before clipping: this process's entries, by name of the parameter, (n,) each.

    A probe's own backward goes through `reduction`, fold by fold, with the loop's folds or others.
    """

    weights: Mapping[str, Tensor]  # before the step
    mean: Mapping[str, Tensor]  # over microbatches and processes, as the optimizer gets it
    layout: Layout
    reduction: FoldReduction
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
    folds: Sequence[FoldGroup]
    fold_sizes: Tensor  # (F,) fp64, n_k: sequences of all processes
    limits: Limits
    prediction_if_any: EntropyPrediction | None = None  # where a probe that measures the step needs it

    @property
    def num_folds(self) -> int:
        """F, over all processes."""
        return len(self.fold_sizes)

    @property
    def num_sequences(self) -> float:
        """Σ n_k, over all processes."""
        return float(self.fold_sizes.sum())

    def sum_by_fold(self, values: Tensor) -> Tensor:
        """Return the sums of (B, …) over the sequences of each fold, (F, …), of all processes. A collective."""
        return self.ranks.reduce(self.batch.sum_by_fold(values))

    def with_prediction(self, change: EntropyPrediction) -> Step:
        """Return the step with what it does to entropy, and with what its scores have shown of the policy."""
        can, why = self.limits, change.other_scores
        if why:
            can = dataclasses.replace(can, sampling_mismatch=why, no_fresh_responses=why)
        return dataclasses.replace(self, prediction_if_any=change, limits=can)

    @property
    def prediction(self) -> EntropyPrediction:
        """`prediction_if_any`; ValueError where no probe has asked for it."""
        if self.prediction_if_any is None:
            raise ValueError("ctx.prediction is made only for a probe with needs = Need.ENTROPY_CHANGE")
        return self.prediction_if_any

"""An optimizer step as data: tensors, numbers and reasons.

For the letters in shapes see policy/rollout.py. step/passes.py computes with this data on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rl_training.optim.leave_one_out import LeaveOneOutUpdates
from rl_training.optim.state import OptimizerView
from rl_training.options import check_flag, check_share, check_whole
from rl_training.parallel.rows import Rows
from rl_training.parallel.vectors import Layout, Vector
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import Batch
from rl_training.step.quantities import Quantity
from rl_training.step.reasons import Reasons


@dataclass(frozen=True)
class Gradients:
    """The step's training gradient before clipping: this rank's entries of each parameter, (n,), by name."""

    weights: Mapping[str, Tensor]  # before the step
    mean: Mapping[str, Tensor]  # over microbatches and ranks, as the optimizer gets it
    layout: Layout
    rows: Rows | None = None  # the mean gradient of each fold: rows.means(), (F, n) per bucket
    rows_reason: Unavailable | None = None  # why `rows` is None although a probe asks for it
    # (F + 1, parameters, 2) fp64: |g_k|² and Σ P g_k² of each fold, the mean gradient last; over all ranks
    sq_norms: Tensor | None = None


@dataclass(frozen=True)
class EntropySettings:
    """How a step's entropy gradient X is estimated.

    Args:
        responses_per_prompt: Responses used per prompt, the first ones. All if it is G or more. Baselines always use
            all responses.
        per_sequence: Compute X per sequence as well, for a second backward.
        unclipped: Compute what the step would do without clipping as well, which takes the optimizer's step twice more
            for each fold of a step that clips.
        error_decay: Variances of single steps are averaged over steps. This is the weight of an optimizer step relative
            to the next one, whether or not they are measured.
    """

    responses_per_prompt: int = 1
    per_sequence: bool = False
    error_decay: float = 0.5
    unclipped: bool = False

    def __post_init__(self) -> None:
        check_whole("responses_per_prompt", self.responses_per_prompt, 1)
        check_flag("per_sequence", self.per_sequence)
        check_flag("unclipped", self.unclipped)
        check_share("error_decay", self.error_decay, "[0, 1)", "; 0.5 averages over three steps")


@dataclass(frozen=True)
class EntropyPrediction:
    """What the step does to entropy to first order. The formulas are in entropy/prediction.py.

    Vectors have the layout of the step's gradients. A `…reason` is None if what it concerns is available.
    """

    settings: EntropySettings
    labels: tuple[str, ...]  # names of the splits of `forward`
    # Why there is no entropy gradient. Of the fields below only the two δθ may then be set.
    reason: Unavailable | None = None
    # The same, because of what the probes' own scores of the responses show: they differ from training's, or the policy
    # did not draw these tokens.
    seen_in_scores: Unavailable | None = None
    forward_reason: Unavailable | None = None  # why no fold can be left out of the step
    backward_reason: Unavailable | None = None  # why the previous update cannot be multiplied with the entropy gradient
    # Why the reward gradient is no multiple of the step's own; with per_sequence.
    reward_reason: Unavailable | None = None
    intended: Vector | None = None  # δθ by the optimizer's formula, until the next step; None if there is none
    update: Vector | None = None  # what weight rounding leaves of `intended`; in fp32 the same vector
    levels: Tensor | None = None  # (F, 3): number of sequences, Σ entropy, Σ length per fold; None if `reason` is set
    quantities: Mapping[str, Quantity] = field(default_factory=dict)  # with Need.ENTROPY_CHANGE
    # (2,), error of the sum ½(forward + backward) from this batch, with two or more folds; with Need.ENTROPY_CHANGE
    half_step_stderr: Tensor | None = None
    rows: Rows | None = None  # E[T] ∂H_tok of each fold; with Need.ENTROPY_ROWS
    leave_one_out: LeaveOneOutUpdates | None = None  # updates without each fold; None if `forward_reason` is set


@dataclass(frozen=True)
class StepData:
    """One optimizer step on this rank: gradients are complete, the parameters are still old."""

    number: int  # counted from 1: the `step` in this optimizer step's log line
    batch: Batch
    gradients: Gradients
    optimizer: OptimizerView
    reasons: Reasons  # as known before probes score the policy again

"""What a step is predicted to do to entropy, as data: how it is estimated, and the δH quantities.

Only this file knows the order of the columns in tables of totals, of products, and of sums of both. They are read by
name or by the constants here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_training.optim.leave_one_out import LeaveOneOutUpdates
from rl_training.options import check_flag, check_share, check_whole
from rl_training.parallel.fold_vectors import FoldVectors
from rl_training.parallel.vectors import Vector
from rl_training.statistics.estimate import NOT_FINITE_GRADIENT, Estimate, effective_samples
from rl_training.statistics.jackknife import FEW_FOLDS, NONE_WITHOUT, stderr_reason
from rl_training.statistics.unavailable import Unavailable

# What entropy is given per: the last dimension of quantities and products, and the order of the entropy gradients.
DENOMINATORS = ("token", "sequence")
# Columns of a fold's totals: its number of sequences, Σ h and Σ T.
TOTALS = ("sequences", "entropy", "length")
SEQUENCES, ENTROPY, LENGTH = range(len(TOTALS))
# Columns of a table of products: X times the updates that these are named after. The splits of `forward` follow.
PRODUCTS = ("forward", "backward", "reuse", "forward_unclipped")
FORWARD, BACKWARD, REUSE, UNCLIPPED = range(len(PRODUCTS))
SPLITS = slice(len(PRODUCTS), None)
# The quantities that have a number per sequence alone.
LENGTH_CHANGE = "length_change"
REWARD_CHANGE = "reward_change"
BIASED = Unavailable("biased", "no error bar: the same-batch product is biased")


def product_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns of a table of products, given those of the splits of `forward`."""
    return (*PRODUCTS, *labels)


def quantity_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a step's quantities in their order, given those of the splits of `forward`."""
    return ("entropy", *product_names(labels), LENGTH_CHANGE, REWARD_CHANGE)


@dataclass(frozen=True)
class FoldSums:
    """Sums over folds, of which everything that is reported is a function. Or each fold's terms of them, (K, …)."""

    table: Tensor  # (…, columns): one table, so that it is summed at once

    @classmethod
    def of(cls, totals: Tensor, products: Tensor, reward: Tensor) -> FoldSums:
        """Join totals, (…, TOTALS), products, (…, products, 2), and the product of the reward's gradient, (…).

        That is per sequence. Its column per token is nan.
        """
        pair = torch.stack([torch.full_like(reward, torch.nan), reward], dim=-1)
        return cls(torch.cat([totals, products.flatten(-2), pair], dim=-1))

    @property
    def totals(self) -> Tensor:
        """(…, TOTALS)."""
        return self.table[..., : len(TOTALS)]

    @property
    def products(self) -> Tensor:
        """n_k X_k · δθ, (…, products, 2), per token and per sequence: PRODUCTS and the splits of `forward`."""
        return self.table[..., len(TOTALS) : -len(DENOMINATORS)].unflatten(-1, (-1, len(DENOMINATORS)))

    @property
    def reward(self) -> Tensor:
        """n_k J_k · δθ, (…), per sequence: the product of the reward's gradient."""
        return self.table[..., -1]


@dataclass(frozen=True)
class EntropySettings:
    """How a step's entropy gradient X is estimated.

    Args:
        responses_per_prompt: Responses used per prompt, the first ones. All if it is G or more. Baselines always use
            all responses.
        per_sequence: Compute X per sequence as well, for a second backward.
        error_decay: Variances of single steps are averaged over steps. This is the weight of an optimizer step relative
            to the next one, whether or not they are measured.
        unclipped: Compute what the step would do without clipping as well, which takes the optimizer's step twice more
            for each fold of a step that clips.
        keep_gathered: Under FSDP2, keep all weights gathered while X is computed.
    """

    responses_per_prompt: int = 1
    per_sequence: bool = False
    error_decay: float = 0.5
    unclipped: bool = False
    keep_gathered: bool = False

    def __post_init__(self) -> None:
        check_whole("responses_per_prompt", self.responses_per_prompt, 1)
        check_flag("per_sequence", self.per_sequence)
        check_flag("unclipped", self.unclipped)
        check_flag("keep_gathered", self.keep_gathered)
        check_share("error_decay", self.error_decay, "[0, 1)", "; 0.5 averages over three steps")


@dataclass(frozen=True)
class Quantity:
    """A quantity per token and per sequence, (2,), or per sequence alone, (1,)."""

    name: str
    value: Tensor
    stderr: Tensor
    about_step: int  # the step to which it refers
    batches: Tensor  # the number of batches of equal variance behind the error (Satterthwaite)
    reason: str = ""  # an Unavailable: why it is missing, if it is
    stderr_of_batch: Tensor | None = None  # the error from this batch alone, if `stderr` averages over steps
    remark: str = ""  # on an available value or error bar, or why only the bar is missing

    def masked_if(self, reason: str | None) -> Quantity:
        """Return this quantity, as nan with the reason if there is one."""
        if not reason:
            return self
        unknown = torch.full_like(self.value, torch.nan)
        return dataclasses.replace(self, value=unknown, stderr=unknown, reason=reason)

    def estimates(self, num_folds: int, few: Unavailable | None = None) -> list[Estimate]:
        """Return each number as an estimate. Error bars require enough folds; `few` may say why there are too few."""
        is_biased = self.name == PRODUCTS[REUSE]
        no_stderr = BIASED if is_biased else stderr_reason(num_folds, few or FEW_FOLDS)
        estimates = []
        for index, (value, stderr) in enumerate(zip(self.value.tolist(), self.stderr.tolist(), strict=True)):
            missing = (self.reason or NOT_FINITE_GRADIENT) if math.isnan(value) else ""
            error = math.nan if missing or is_biased else stderr
            no_error = no_stderr or (NONE_WITHOUT if math.isnan(error) else "")
            # Student's t then has (num_folds − 1) · batches degrees of freedom.
            num_samples = num_folds if math.isnan(error) else effective_samples(num_folds, float(self.batches[index]))
            detail: dict[str, str | float] = {}
            if not math.isnan(error) and self.stderr_of_batch is not None:
                detail["stderr_of_batch"] = float(self.stderr_of_batch[index])
            estimates.append(
                Estimate(value, error, num_samples, missing or no_error or self.remark, self.about_step, detail)
            )
        return estimates


@dataclass(frozen=True)
class EntropyPrediction:
    """What the step does to entropy to first order. The formulas are in prediction.py.

    What is set, beside settings, labels and peak_bytes, depends on whether the step has an entropy gradient X:

                                         without X                  with X
        reason                           always                     never
        is_seen_in_scores                if scores have shown why   never
        unrounded_update, update         if scores have shown why   always, by `PreviousUpdate.advance`
        totals                           never                      always
        leave_one_out                    never                      unless there is a `forward_reason`
        quantities, half_step_stderr     never                      with Need.ENTROPY_CHANGE
        entropy_gradients                never                      with Need.FOLD_ENTROPY_GRADIENTS

    If the optimizer has no formula, there are no updates. They hold until the next step is predicted. Other reasons are
    set only with X, and are None if what they concern is available. Vectors have the layout of the step's gradients.
    """

    settings: EntropySettings
    labels: tuple[str, ...]  # names of the splits of `forward`
    reason: Unavailable | None = None  # why there is no X
    # Whether `reason` is what the probes' own scores of the responses show: they differ from training's, or the policy
    # did not draw these tokens.
    is_seen_in_scores: bool = False
    forward_reason: Unavailable | None = None  # why no fold can be left out of the step
    backward_reason: Unavailable | None = None  # why the previous update cannot be multiplied with the entropy gradient
    # Why the reward gradient is no multiple of the step's own; with per_sequence.
    reward_reason: Unavailable | None = None
    unrounded_update: Vector | None = None  # δθ by the optimizer's formula, before weights are rounded
    update: Vector | None = None  # δθ; without rounding the same vector as `unrounded_update`
    totals: Tensor | None = None  # of each fold, (K, TOTALS)
    quantities: Mapping[str, Quantity] = field(default_factory=dict)  # by `quantity_names`
    half_step_stderr: Tensor | None = None  # (2,), error of ½(forward + backward) from this batch; nan for one fold
    entropy_gradients: FoldVectors | None = None  # X of each fold, E[T] ∂H_tok
    leave_one_out: LeaveOneOutUpdates | None = None  # updates without each fold
    peak_bytes: int = 0  # the most bytes of vectors that were held at once while this was made

    @property
    def variance_of_batch(self) -> dict[str, Tensor]:
        """The variances of all quantities but entropy, by name, from this batch alone."""
        errors = {name: quantity.stderr_of_batch for name, quantity in self.quantities.items()}
        return {name: error.square() for name, error in errors.items() if error is not None}

    def without_entropy_gradient(self, reason: Unavailable) -> EntropyPrediction:
        """Return what is left if scores show only now that the policy did not draw the responses."""
        return EntropyPrediction(
            self.settings,
            self.labels,
            reason,
            is_seen_in_scores=True,
            unrounded_update=self.unrounded_update,
            update=self.update,
            peak_bytes=self.peak_bytes,
        )

"""Check whether a step followed the optimizer's formula, on which its predictions are based.

A loop may scale, edit or drop gradients, clip other than it said, or step with another optimizer. No setting lists all
that, so the actual change of the weights is compared with the calculated one. If they differ, the step's predictions
are void.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.entropy.attribution import layer
from rl_training.entropy.data import EntropyPrediction
from rl_training.entropy.previous_update import PreviousUpdate
from rl_training.errors import UserError
from rl_training.optim.rounding import rounded_update
from rl_training.optim.state import OptimizerView
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sharding import Shard
from rl_training.parallel.sums import sums_of_spans
from rl_training.parallel.vectors import sample_entries
from rl_training.statistics.estimate import DESCRIBES_STEP, NOT_FINITE_GRADIENT, Estimate
from rl_training.statistics.unavailable import Unavailable

# Allowed error relative to the norm of the calculated step: a sixteenth of the rounded weights that move may differ.
ROUNDED_WEIGHTS_TOLERANCE = 0.25
HALF_PRECISION_TOLERANCE = 2.0**-5  # relative difference allowed in a step if the optimizer computes in half precision
REMARK_BELOW = 0.9  # a remark is made if less than this share of a step survives rounding
NOT_TO_NEAREST = "; if all of that holds, the optimizer does not round to nearest, and its steps cannot be predicted"
SHARE = "update/surviving_share"
# The smallest share of any layer, named in the detail; outside of layers, of a kind of module.
LEAST_SHARE = f"{SHARE}/least"
NO_STEP = Unavailable("no_step", "the formula moves no weight here")
LOST_REMARK = "{lost:.0%} of this step is lost to rounding: keep fp32 weights, or raise the learning rate"
_OTHERS = "something other than the optimizer that probes know of (a second optimizer, weight averaging, an edit)"
EDITED_AFTER_STEP = Unavailable("edited_after_step", f"weights were changed after it by {_OTHERS}")
EDITED_BEFORE_STEP = Unavailable(
    "edited_before_step", f"weights were changed between the probes' measurement and the optimizer's step by {_OTHERS}"
)
EDITED_WITHIN_STEP = Unavailable(
    "edited_within_step",
    "weights were changed in this step before the optimizer changed them, so its responses and gradients are not those "
    "of the policy that is updated",
    fix="swap or edit weights between steps",
)
NOT_THE_FORMULA = Unavailable(
    "not_the_formula",
    "the step was not the optimizer's formula: the weights' change differs from it by {error:.2g} of its norm "
    "(step/formula_error)",
    fix="clip as max_grad_norm says, step once, with this optimizer and learning rate, and change weights in no "
    "other way",
)
LEFT_OUT = Unavailable("left_out", "this step was left out: the optimizer has not changed the weights")


def refuse_other_parameters(shard: Shard) -> None:
    """Raise UserError if the trained parameters are no longer those that were trained when measuring began."""
    trained = {name for name, param in shard.model.named_parameters() if param.requires_grad}
    for name in sorted(trained ^ shard.trained.keys()):
        raise UserError(
            f"{name} is {'' if name in trained else 'not '}trained now, unlike when probes began to measure: freeze, "
            "unfreeze and untie before training, or train and measure each stage by itself"
        )


@dataclass
class _PredictedStep:
    """A predicted step, until it is verified. Weights are sampled ones."""

    weights: Tensor  # when the probes see the step
    formula_update: Tensor | None  # what the formula adds to them. None if the optimizer has none, or no prediction
    reason: Unavailable | None  # why there is no formula
    is_rounded: bool  # whether weights are rounded, so that the measured update takes the formula's place
    max_error: float  # of the step, relative to the formula's
    weights_before_step: Tensor | None = None  # right before the optimizer's step, if there is no formula


class UpdateVerifier:
    """Compares each step with the optimizer's formula. Predictions for a step that differs are void.

    The calls of a measured step, in their order:

        begin_step         it begins: has anything changed the weights since the last one?
        begin_measuring    its gradients are complete: has anything changed the weights since it began?
        expect             it is predicted, or not
        about_to_step      right before the optimizer's step, if the loop knows that moment
        verify             after it: is the change of the weights the formula's?
    """

    def __init__(self, shard: Shard, previous: PreviousUpdate, ranks: Ranks) -> None:
        self._shard, self._layout, self._previous, self._ranks = shard, shard.layout, previous, ranks
        weights, layers = shard.weights(), [layer(name) for name in shard.trained]
        self._layers = list(dict.fromkeys(layers))
        self._layer_of = torch.tensor(
            [self._layers.index(layer_name) for layer_name in layers], device=self._layout.device
        )
        is_below_fp32 = [torch.tensor(weight.dtype.itemsize < 4).expand(len(weight)) for weight in weights.values()]
        self._is_below_fp32 = sample_entries(self._layout, is_below_fp32).bool()
        # entries sampled from each parameter
        self._sizes = tuple(len(sample_entries(self._layout, [part])) for part in is_below_fp32)
        dtypes = {weight.dtype for weight in weights.values()}
        self._smallest_dtype = min(dtypes, key=lambda dtype: dtype.itemsize)
        self._precision = max((torch.finfo(dtype).eps for dtype in dtypes if dtype.itemsize >= 4), default=0.0)
        self._weights_at_begin: Tensor | None = None  # sampled weights at the start of the step
        self._weights_at_measure = torch.empty(0)  # sampled weights when the probes see the step
        self._weights_after_step: Tensor | None = None  # after the optimizer's step
        self._step: _PredictedStep | None = None  # None if the current step is not predicted

    def begin_step(self) -> None:
        """Read the weights, and forget the previous step if the weights differ from those it ended with. Collective."""
        self._weights_at_begin = self._sampled_weights()
        if self._weights_after_step is not None and self._differ(self._weights_at_begin, self._weights_after_step):
            self._previous.forget(EDITED_AFTER_STEP)
        self._weights_after_step = None

    def begin_measuring(self) -> Unavailable | None:
        """Read the weights that probes will see. Collective.

        Returns:
            That they were changed since the step began, or None.
        """
        self._weights_at_measure = self._sampled_weights()
        if self._weights_at_begin is None or not self._differ(self._weights_at_begin, self._weights_at_measure):
            return None
        return EDITED_WITHIN_STEP

    def _sampled_weights(self) -> Tensor:
        return sample_entries(self._layout, self._shard.weights().values())

    def _differ(self, first: Tensor, other: Tensor) -> bool:
        # compared bit by bit, so that nan equals itself
        changed = (first.view(torch.int64) != other.view(torch.int64)).any()
        return float(self._ranks.reduce(changed.double())) > 0.0

    def expect(self, optimizer: OptimizerView, prediction: EntropyPrediction | None) -> None:
        """Keep what is needed to verify the upcoming step."""
        self._step = None
        if prediction is None:
            return
        update = None
        if prediction.intended is not None:
            update = sample_entries(self._layout, self._layout.by_name(prediction.intended).values())
        self._step = _PredictedStep(
            weights=self._weights_at_measure,
            formula_update=update,
            reason=prediction.reason or optimizer.reason,
            is_rounded=bool(optimizer.rounding_reason),
            max_error=ROUNDED_WEIGHTS_TOLERANCE if optimizer.rounding_reason else optimizer.max_error,
        )

    def about_to_step(self) -> None:
        """Read the weights right before the optimizer's step. With a formula, `verify` detects earlier edits anyway."""
        if self._step is not None and self._step.formula_update is None:
            self._step.weights_before_step = self._sampled_weights()

    def verify(self, was_taken: bool) -> tuple[dict[str, Estimate], Unavailable | None]:
        """Return how far the step was from the formula, what rounding left, and why predictions are void. Collective.

        Args:
            was_taken: False if the loop skipped the step.

        Returns:
            Estimates by name, empty if nothing was predicted for the step. Then why its predictions are void, None if
            the step followed the formula or the optimizer has none.
        """
        step, self._step = self._step, None
        if step is None:
            return {}, None
        names = ["step/formula_error", SHARE, LEAST_SHARE]
        self._weights_after_step = self._sampled_weights()
        if step.formula_update is None:
            if not was_taken:
                self._previous.forget(LEFT_OUT)
            elif step.weights_before_step is not None and self._differ(step.weights, step.weights_before_step):
                self._previous.forget(EDITED_BEFORE_STEP)
            assert step.reason is not None
            return dict.fromkeys(names, Estimate.missing(step.reason)), None
        change = self._weights_after_step - step.weights
        error, share, *layer_shares = self._compare(step.weights, change, step.formula_update)
        reason = None
        if error > step.max_error or not was_taken:
            reason = NOT_THE_FORMULA.formatted(error=error)
            reason = reason.with_fix(reason.fix + NOT_TO_NEAREST) if step.is_rounded else reason
            has_moved = was_taken and self._differ(step.weights, self._weights_after_step)
            reason = reason if has_moved else LEFT_OUT
            if not step.is_rounded or not has_moved:  # δθ of rounded weights was measured, so it stays valid
                self._previous.forget(reason)
        moved_layers = [
            (layer_share, name)
            for layer_share, name in zip(layer_shares, self._layers, strict=True)
            if not math.isnan(layer_share)
        ]
        least, layer_name = min(moved_layers, default=(math.nan, ""))
        estimates = {
            names[0]: Estimate(error, reason=NOT_FINITE_GRADIENT if math.isnan(error) else DESCRIBES_STEP),
            SHARE: _share_estimate(share),
            LEAST_SHARE: dataclasses.replace(_share_estimate(least), detail={"layer": layer_name}),
        }
        return estimates, reason

    def _compare(self, weights: Tensor, moved: Tensor, formula: Tensor) -> list[float]:
        """Return the error of the step beyond rounding, then (δ_actual · δ) / δ² over all weights and for each layer.

        The error is inf if weights move that should not, or become non-finite, and nan if the formula itself is not
        finite. A share is nan if the formula moves nothing.
        """
        rounded, rounding = formula, self._precision * weights.abs()
        deviation = ((moved - formula).abs() - rounding).clamp_(min=0.0)
        if self._smallest_dtype.itemsize < 4:
            factors = (1.0, 1.0 - HALF_PRECISION_TOLERANCE, 1.0 + HALF_PRECISION_TOLERANCE)
            rounded, *bounds = (self._round_change(weights, factor * formula) for factor in factors)
            nearest = moved.clamp(torch.minimum(*bounds), torch.maximum(*bounds))
            deviation = torch.where(self._is_below_fp32, moved - nearest, deviation)
        products = (deviation.square(), rounded.square(), moved * formula, formula.square())
        sums = sums_of_spans(torch.cat(products), self._sizes * len(products)).view(len(products), -1)
        by_layer = torch.zeros(len(self._layers), len(products), dtype=torch.float64, device=moved.device)
        by_layer = self._ranks.reduce(by_layer.index_add_(0, self._layer_of, sums.t())).cpu()
        table = torch.cat([by_layer.sum(dim=0, keepdim=True), by_layer])  # the total comes first
        sq_deviation, square = table[0, :2].tolist()
        error = math.sqrt(sq_deviation / square) if square else math.inf if sq_deviation else 0.0
        if math.isnan(error) and math.isfinite(square):
            error = math.inf
        return [error, *(table[:, 2] / table[:, 3]).tolist()]

    def _round_change(self, weights: Tensor, change: Tensor) -> Tensor:
        """Return what is left of a change of the sampled weights after rounding."""
        return torch.where(self._is_below_fp32, rounded_update(weights.to(self._smallest_dtype), change), change)


def _share_estimate(share: float) -> Estimate:
    if math.isnan(share):
        return Estimate.missing(NO_STEP)
    return Estimate(share, reason=LOST_REMARK.format(lost=1.0 - share) if share < REMARK_BELOW else DESCRIBES_STEP)

"""Check whether a step followed the optimizer's formula, on which its predictions are based.

A loop may scale, edit or drop gradients, clip other than it said, or step with another optimizer. No setting lists all
that, so the actual change of the weights is compared with the calculated one. If they differ, the step's predictions
are void.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_training.entropy.attribution import layer
from rl_training.optim.rounding import rounded_update
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sharding import Shard
from rl_training.parallel.sums import sums_of_spans
from rl_training.parallel.vectors import Vector, sample_entries
from rl_training.statistics.estimate import DESCRIBES_STEP, NOT_FINITE_GRADIENT, Estimate
from rl_training.statistics.unavailable import Unavailable

# Allowed error relative to the norm of the calculated step: a sixteenth of the rounded weights that move may differ.
ROUNDED_WEIGHTS_TOLERANCE = 0.25
HALF_PRECISION_TOLERANCE = 2.0**-5  # relative difference allowed in a step if the optimizer computes in half precision
REMARK_BELOW = 0.9  # a remark is made if less than this share of a step survives rounding
NOT_TO_NEAREST = "; if all of that holds, the optimizer does not round to nearest, and its steps cannot be predicted"
FORMULA_ERROR = "step/formula_error"
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
    fix="leave gradients as the backward made them but for clipping by max_grad_norm, step once, with this optimizer "
    "and learning rate, and change weights in no other way",
)
LEFT_OUT = Unavailable("left_out", "this step was left out: the optimizer has not changed the weights")


@dataclass(frozen=True)
class Verification:
    """How a step was taken, and whether its predictions hold."""

    estimates: Mapping[str, Estimate] = field(default_factory=dict)  # empty if nothing was predicted
    void_reason: Unavailable | None = None  # the reason why its predictions do not hold

    @classmethod
    def missing(cls, reason: Unavailable) -> Verification:
        """Return the verification of a step without a formula: its predictions use none, so they are not void."""
        return cls(dict.fromkeys((FORMULA_ERROR, SHARE, LEAST_SHARE), Estimate.missing(reason)))


class UpdateVerifier:
    """Reads some of the weights, and compares their changes with each other and with the optimizer's formula."""

    def __init__(self, shard: Shard, ranks: Ranks) -> None:
        self._shard = shard
        self._layout = shard.layout
        self._ranks = ranks
        weights = shard.weights()
        layers = [layer(name) for name in shard.trained]
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

    def read_weights(self) -> Tensor:
        """Return the sampled weights."""
        return sample_entries(self._layout, self._shard.weights().values())

    def sample(self, update: Vector) -> Tensor:
        """Return the same entries of an update."""
        return sample_entries(self._layout, self._layout.by_name(update).values())

    def differ(self, first: Tensor, other: Tensor) -> bool:
        """Return whether sampled weights differ on any rank. Collective."""
        # compared bit by bit, so that nan equals itself
        changed = (first.view(torch.int64) != other.view(torch.int64)).any()
        return self._ranks.any(changed)

    def compare(self, weights: Tensor, change: Tensor, formula: Tensor) -> dict[str, Estimate]:
        """Return how far a change of sampled weights was from the formula's, and what rounding left of it. Collective.

        The error is inf if weights move that should not, or become non-finite, and nan if the formula itself is not
        finite.

        Args:
            weights: The weights before the change.
            change: The change.
            formula: What the formula adds to them.

        Returns:
            Estimates by name.
        """
        deviation, rounded = self._deviation(weights, change, formula)
        products = {
            "deviation²": deviation.square(),
            "rounded²": rounded.square(),
            "change·formula": change * formula,
            "formula²": formula.square(),
        }
        by_layer = self._sums_by_layer([*products.values()])
        total = dict(zip(products, by_layer.sum(dim=0), strict=True))
        of_layers = dict(zip(products, by_layer.unbind(dim=1), strict=True))
        error = _formula_error(float(total["deviation²"]), float(total["rounded²"]))
        shares = (of_layers["change·formula"] / of_layers["formula²"]).tolist()  # nan if the formula moves nothing
        moved_layers = [
            (share, name) for share, name in zip(shares, self._layers, strict=True) if not math.isnan(share)
        ]
        least_share, least_layer = min(moved_layers, default=(math.nan, ""))
        return {
            FORMULA_ERROR: Estimate(error, reason=NOT_FINITE_GRADIENT if math.isnan(error) else DESCRIBES_STEP),
            SHARE: _share_estimate(float(total["change·formula"] / total["formula²"])),
            LEAST_SHARE: dataclasses.replace(_share_estimate(least_share), detail={"layer": least_layer}),
        }

    def _deviation(self, weights: Tensor, change: Tensor, formula: Tensor) -> tuple[Tensor, Tensor]:
        """Return by how much a change differs from the formula's beyond rounding, and the formula's after rounding."""
        rounding = self._precision * weights.abs()
        deviation = ((change - formula).abs() - rounding).clamp_(min=0.0)
        if self._smallest_dtype.itemsize >= 4:
            return deviation, formula
        rounded, *bounds = (
            self._round_change(weights, factor * formula)
            for factor in (1.0, 1.0 - HALF_PRECISION_TOLERANCE, 1.0 + HALF_PRECISION_TOLERANCE)
        )
        nearest = change.clamp(torch.minimum(*bounds), torch.maximum(*bounds))
        return torch.where(self._is_below_fp32, change - nearest, deviation), rounded

    def _sums_by_layer(self, products: Sequence[Tensor]) -> Tensor:
        """Return the sums of these sampled entries over each layer on all ranks, (layers, products). Collective."""
        sums = sums_of_spans(torch.cat([*products]), self._sizes * len(products)).view(len(products), -1)
        by_layer = torch.zeros(len(self._layers), len(products), dtype=torch.float64, device=sums.device)
        return self._ranks.reduce(by_layer.index_add_(0, self._layer_of, sums.t())).cpu()

    def _round_change(self, weights: Tensor, change: Tensor) -> Tensor:
        """Return what is left of a change of the sampled weights after rounding."""
        return torch.where(self._is_below_fp32, rounded_update(weights.to(self._smallest_dtype), change), change)


def _formula_error(sq_deviation: float, sq_rounded: float) -> float:
    """Return the norm of what deviates from a rounded step, relative to the step's."""
    if not sq_rounded:
        return math.inf if sq_deviation else 0.0
    error = math.sqrt(sq_deviation / sq_rounded)
    return math.inf if math.isnan(error) and math.isfinite(sq_rounded) else error


def _share_estimate(share: float) -> Estimate:
    if math.isnan(share):
        return Estimate.missing(NO_STEP)
    return Estimate(share, reason=LOST_REMARK.format(lost=1.0 - share) if share < REMARK_BELOW else DESCRIBES_STEP)

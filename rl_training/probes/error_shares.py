"""The error shares probe: what of forward's variance comes from the entropy gradient X, and what from the update δθ.

Without fold l forward loses X_l, and the steps of all other folds lose g_l. With the steps kept as they are it loses
X_l alone: that is the jackknife of the mean of X_k · δθ. Its deviation and what is left of forward's are the two parts,
and forward's variance is the one's, the other's and twice their covariance: three shares that add up to 1. More
responses per prompt make the first smaller, only a larger batch the second. The covariance is there because X_l and g_l
come from the same prompts; its share may be negative. Each share is a ratio of averages over steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.engine.entropy_change import FORWARD, REUSE, FoldSums, statistic
from rl_training.engine.probe import Need, Probe
from rl_training.engine.quantities import NOT_FINITE
from rl_training.engine.step import Step
from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR, Estimate
from rl_training.mathematics.running_variance import RunningVariance

SHARES = ("entropy_gradient", "update", "covariance")
SEVERAL_PROCESSES = "how a fold on one process changes the steps of folds on others is not known: use one process"
FEW_FOLDS = f"forward has no error bar: it needs {MIN_FOLDS_FOR_STDERR} folds of whole prompts"
NO_ERROR = "no error bar: a share of an error"


def error_terms(sums: FoldSums) -> Tensor:
    """Returns (3, 2): the parts of forward's variance from X, from δθ, and twice their covariance; they add up to it.

    Per token and per sequence, for folds of one rank, which are all there are.
    """
    values = statistic(sums.without)
    whole, of_x = values[:, 1 + FORWARD], values[:, 1 + REUSE]  # the latter's steps lose nothing
    of_x, of_step = (of - of.mean(dim=0) for of in (of_x, whole - of_x))
    covariances = torch.stack([of_x.square(), of_step.square(), 2.0 * of_x * of_step]).sum(dim=1)
    return (len(whole) - 1) / len(whole) * covariances


class ErrorSharesProbe(Probe):
    """Measures the shares of forward's variance, `delta_h/error_share/…`. One process only.

    error_decay  weight of a step relative to the next, as of the errors themselves
    every        measure each `every`-th step
    """

    name = "error_shares"
    needs = Need.ENTROPY_CHANGE

    def __init__(self, error_decay: float = 0.5, every: int = 1) -> None:
        super().__init__(every)
        if not 0.0 <= error_decay < 1.0:
            raise ValueError(f"error_shares: error_decay={error_decay} must lie in [0, 1); 0.5 averages over three")
        self.running = RunningVariance(error_decay)

    def prepare(self, step: Step) -> None:
        suffixes = ("", "_sequence")[: 1 + step.entropy_change.settings.per_sequence]
        metrics = [[f"delta_h/error_share/{share}{suffix}" for suffix in suffixes] for share in SHARES]
        reason = SEVERAL_PROCESSES if step.ranks.count > 1 else ""
        reason = reason or step.entropy_change.why_none or step.entropy_change.why_no_forward
        if reason or step.capabilities.num_folds < MIN_FOLDS_FOR_STDERR:
            self._answers = {name: Estimate.missing(reason or FEW_FOLDS) for names in metrics for name in names}
            return
        sums = step.entropy_change.sums
        terms, _ = self.running.add(error_terms(sums).cpu())
        shares = terms / terms.sum(dim=0)
        self._answers = {
            name: Estimate(value, num_samples=sums.num_folds, reason=NO_ERROR if value == value else NOT_FINITE)
            for names, values in zip(metrics, shares.tolist(), strict=True)
            for name, value in zip(names, values, strict=False)
        }

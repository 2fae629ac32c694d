"""What of forward's variance comes from the entropy gradient X, and what from the update δθ, averaged over steps.

Without fold l forward loses X_l, and the steps of all other folds lose g_l. With the steps left as they are it loses
X_l alone: that is the jackknife of the mean of X_k · δθ. Its deviation and what is left of forward's are the two parts,
and forward's variance is the one's, the other's and twice their covariance: three shares that add up to 1. The
covariance is there because X_l and g_l come from the same prompts; its share may be negative.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR, Estimate
from rl_training.mathematics.running_variance import RunningVariance
from rl_training.step.fold_sums import FORWARD, REUSE, FoldSums, statistic
from rl_training.step.quantities import NOT_FINITE

SHARES = ("error_share/entropy_gradient", "error_share/update", "error_share/covariance")
SEVERAL_PROCESSES = "what a fold of one process does to the steps of another's is not known: it takes one process"
FEW_FOLDS = f"forward has no error bar: it needs {MIN_FOLDS_FOR_STDERR} folds of whole prompts"
NO_ERROR = "no error bar: a share of an error"


def error_terms(sums: FoldSums) -> Tensor:
    """Returns (3, 2): what X brings to forward's variance, what δθ does, and twice their covariance; they add up to it.

    Per token and per sequence, for folds of one rank, which are all there are.
    """
    values = statistic(sums.without)
    whole, of_x = values[:, 1 + FORWARD], values[:, 1 + REUSE]  # the latter's steps lose nothing
    of_x, of_step = (of - of.mean(dim=0) for of in (of_x, whole - of_x))
    covariances = torch.stack([of_x.square(), of_step.square(), 2.0 * of_x * of_step]).sum(dim=1)
    return (len(whole) - 1) / len(whole) * covariances


class ErrorShares:
    """The shares, each a ratio of averages over steps.

    decay  weight of a step relative to the next, as of the errors themselves
    """

    def __init__(self, decay: float) -> None:
        self._terms = RunningVariance(decay)

    def estimates(self, sums: FoldSums, num_ranks: int, reason: str) -> dict[str, list[Estimate]]:
        """Returns each share, per token and per sequence; with a reason why there is no forward, nan with that."""
        reason = reason or (SEVERAL_PROCESSES if num_ranks > 1 else "")
        reason = reason or (FEW_FOLDS if sums.num_folds < MIN_FOLDS_FOR_STDERR else "")
        if reason:
            return {name: [Estimate.missing(reason)] * 2 for name in SHARES}
        terms, _ = self._terms.add(error_terms(sums).cpu())
        shares = terms / terms.sum(dim=0)
        return {
            name: [
                Estimate(value, num_samples=sums.num_folds, reason=NO_ERROR if value == value else NOT_FINITE)
                for value in of_name
            ]
            for name, of_name in zip(SHARES, shares.tolist(), strict=True)
        }

    def state_dict(self) -> dict[str, Tensor]:
        return self._terms.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._terms.load_state_dict(state)

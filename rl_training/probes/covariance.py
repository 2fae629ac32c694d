"""The covariance probe: −Cov(log π, A) over the batch of each step, the entropy predictor of Cui et al.

It costs nothing: log-probabilities and advantages are there, and eight numbers go over the network. Its scale is
unknown (see mathematics/advantage_covariance.py), so it is compared with measured changes by correlation; the report
draws it beside delta_h/forward, which has a scale.

Errors are delete-one-fold jackknife over folds of whole prompts. Source: Cui et al. 2025, arXiv 2505.22617.
"""

from __future__ import annotations

import math

from rl_training.engine.probe import Probe
from rl_training.engine.step import Step
from rl_training.mathematics.advantage_covariance import covariance_terms, minus_covariance
from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR, Estimate
from rl_training.mathematics.jackknife import jackknife_stderr

FEW_FOLDS = f"fewer than {MIN_FOLDS_FOR_STDERR} folds of whole prompts: no error bar"
NOT_FINITE = "a log-probability or an advantage of the step is not a finite number"


class CovariancePredictorProbe(Probe):
    """Measures −Cov(log π, A) per token and per sequence. See the module's docstring.

    every  measure each `every`-th step
    """

    name = "covariance"

    def prepare(self, step: Step) -> None:
        batch, reduce = step.batch, step.ranks.reduce
        terms = covariance_terms(batch.scores, batch.rollout.advantages).flatten(1)
        folds = terms.new_zeros(batch.num_folds, terms.shape[1]).index_add_(0, batch.fold, terms)
        total = reduce(folds.sum(dim=0))
        num_folds = int(reduce(total.new_tensor(float(len(folds)))))
        stderr = jackknife_stderr(
            lambda sums: minus_covariance(sums.unflatten(-1, (2, 4))), total, total - folds, reduce
        ).tolist()
        values = minus_covariance(total.view(2, 4)).tolist()
        names = ("covariance/token", "covariance/sequence")
        self._answers = {
            name: _answer(value, error, num_folds) for name, value, error in zip(names, values, stderr, strict=True)
        }

    def results(self) -> dict[str, Estimate]:
        return self._answers


def _answer(value: float, stderr: float, num_folds: int) -> Estimate:
    if not math.isfinite(value):
        return Estimate.missing(NOT_FINITE)
    if num_folds < MIN_FOLDS_FOR_STDERR:
        return Estimate(value, num_samples=num_folds, reason=FEW_FOLDS)
    return Estimate(value, stderr, num_folds)

"""The covariance probe: −Cov(log π, A) over the batch of each step, the entropy predictor of Cui et al.

Its scale is unknown (see probes/advantage_covariance.py), so compare it with measured changes by correlation. Errors
are from the delete-one-fold jackknife over folds of whole prompts. Source: Cui et al. 2025, arXiv 2505.22617.
"""

from __future__ import annotations

from typing import Any

from rl_training.engine.context import StepContext
from rl_training.engine.probe import Probe, Reading
from rl_training.probes.advantage_covariance import covariance_terms, minus_covariance
from rl_training.statistics.jackknife import FEW_FOLDS, estimates_over_units


class CovariancePredictorProbe(Probe):
    """Measures −Cov(log π, A) per token and per sequence. See the module's docstring.

    Args:
        every: Measure each `every`-th step.
    """

    name = "covariance"

    def measure(self, ctx: StepContext, state: Any) -> Reading:
        # (B, 8): count, Σx, Σy, Σxy of a sequence's tokens, then of the sequence
        terms = covariance_terms(ctx.step.batch.scores, ctx.step.batch.rollout.advantages_of_tokens).flatten(1)
        estimates = estimates_over_units(
            ("covariance/token", "covariance/sequence"),
            lambda sums: minus_covariance(sums.unflatten(-1, (2, 4))),
            ctx.sum_by_fold(terms),
            no_bar=ctx.reasons.split_prompts,
            few=FEW_FOLDS,
        )
        return Reading(measured=estimates)

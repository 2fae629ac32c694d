"""The entropy predictor of Cui et al. from U: −Cov(log π, A), with a jackknife error over prompts."""

from __future__ import annotations

from rl_training.mathematics.advantage_covariance import covariance_terms, minus_covariance
from rl_training.mathematics.jackknife import Replicates
from rl_training.offline.buffers import UpdateBuffer
from rl_training.offline.restored import RestoredTrainer


def covariance_of(restored: RestoredTrainer, update: UpdateBuffer) -> Replicates:
    """Returns −Cov(log π, A), (2,) per token and per sequence over all of U, and without each prompt. One scoring of U.

    Its scale is unknown: see mathematics/advantage_covariance.py.
    """
    terms = covariance_terms(restored.policy.score_rollout(update.rollout), update.rollout.advantages)
    of_prompt = terms.new_zeros(update.num_prompts, *terms.shape[1:])
    of_prompt = restored.reduce(of_prompt.index_add_(0, update.rollout.prompt_index, terms))
    total = of_prompt.sum(dim=0)
    return Replicates(minus_covariance(total), minus_covariance(total - of_prompt))

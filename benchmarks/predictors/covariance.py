"""−lr Cov(log π, A) over the tokens of the batch."""

import torch

from predictors import StepFacts
from rl_training.mathematics.advantage_covariance import covariance_terms, minus_covariance
from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.scores import Scores

SOURCE = "Cui et al. 2025, arXiv:2505.22617, theorem 2 with tokens for actions; their scale η is taken to be lr"


def predict(step: StepFacts) -> Estimate:
    scores = Scores(step.logps, torch.zeros_like(step.logps), step.mask)
    per_token, _ = minus_covariance(covariance_terms(scores, step.advantages).sum(dim=0)).tolist()
    return Estimate(step.learning_rate * per_token)

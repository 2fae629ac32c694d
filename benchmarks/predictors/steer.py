"""−lr mean Ω, Ω = A (1 − p) (log p + H) of the sampled token: on-policy, p/p_old is 1."""

from predictors import StepFacts
from rl_training.mathematics.estimate import Estimate

SOURCE = "Hao et al. 2025 (STEER), arXiv:2510.10150, Ω as in the authors' core_algos.py; its scale is taken to be lr"


def predict(step: StepFacts) -> Estimate:
    omega = step.advantages.unsqueeze(1) * (1 - step.logps.exp()) * (step.logps + step.entropies)
    return Estimate(-step.learning_rate * step.mean(omega))

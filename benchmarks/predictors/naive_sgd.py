"""−lr X · g, entropy gradient and clipped training gradient from one batch: as if every optimizer were plain SGD."""

from predictors import StepFacts
from rl_training.mathematics.estimate import Estimate

SOURCE = "first order of gradient descent; neither momentum nor preconditioner is in it"


def predict(step: StepFacts) -> Estimate:
    return step.products["sgd"]

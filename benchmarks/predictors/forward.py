"""X_k · δθ_(−k), leave-fold-out: `delta_h/forward` of the probe `simple`."""

from predictors import StepFacts
from rl_training.mathematics.estimate import Estimate

SOURCE = "this project, docs/explanation/theory.md"


def predict(step: StepFacts) -> Estimate:
    return step.products["forward"]

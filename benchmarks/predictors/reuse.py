"""X · δθ, entropy gradient and AdamW's or SGD's real step from one batch: the naive product, `delta_h/reuse`."""

from predictors import StepFacts
from rl_training.mathematics.estimate import Estimate

SOURCE = "the product without any fold left out, docs/explanation/theory.md"


def predict(step: StepFacts) -> Estimate:
    return step.products["reuse"]

"""X_E · δθ by fresh responses, one each to 128 prompts, that neither the step nor the truth has: `deltaH1` offline."""

from predictors import StepFacts
from rl_training.mathematics.estimate import Estimate

SOURCE = "this project, docs/explanation/theory.md"


def predict(step: StepFacts) -> Estimate:
    return step.products.get("deltaH1", Estimate.missing("no fresh responses at this step"))

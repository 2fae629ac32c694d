"""−lr mean A (S − E[S]), S(v) = p_v (log p_v + H): first order of the step of a table of logits at each position.

A logit of the sampled token a moves by A (1 − p_a), all others by −A p_v; dH = −Σ_v p_v (log p_v + H) dz_v.
"""

from predictors import StepFacts
from rl_training.mathematics.estimate import Estimate

SOURCE = (
    "Wang et al. 2026, arXiv:2602.03392, theorem 3.3; the entropy sensitivity Φ of STARE (Luo et al. 2026, "
    "arXiv:2606.19236, theorem 3.1) is the same function. Their scale is taken to be lr"
)


def predict(step: StepFacts) -> Estimate:
    sampled = step.logps.exp() * (step.logps + step.entropies)
    expected = step.log_squares + step.entropies * step.squares
    return Estimate(-step.learning_rate * step.mean(step.advantages.unsqueeze(1) * (sampled - expected)))

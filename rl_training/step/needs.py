"""What probes can ask the engine to keep for a step."""

from __future__ import annotations

import enum


class Need(enum.Flag):
    """What costs memory or time and is therefore kept only if a probe asks for it."""

    NOTHING = 0
    FOLD_GRADIENTS = 1  # one vector of this rank's entries per fold: ctx.step.gradients.by_fold
    SQ_NORMS = 2  # two numbers per parameter, for each fold and for all: ctx.step.gradients.sq_norms
    ENTROPY_GRADIENT = 4 | FOLD_GRADIENTS  # ctx.prediction; the next two add to it
    ENTROPY_CHANGE = 8 | ENTROPY_GRADIENT  # ctx.prediction.quantities; keeps δθ of the previous step
    FOLD_ENTROPY_GRADIENTS = 16 | ENTROPY_GRADIENT  # ctx.prediction.entropy_gradients: one more vector per fold
    TERMS_CHECK = 32  # recompute a fold's gradient now and then, so ctx.reasons.other_terms need not trust the loop

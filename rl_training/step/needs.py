"""What probes can ask to be kept of a step."""

from __future__ import annotations

import enum


class Need(enum.Flag):
    """What costs memory or time and is therefore kept only if a probe asks for it."""

    NOTHING = 0
    FOLD_GRADIENTS = 1  # a vector of this process's entries per fold: ctx.step.gradients.rows
    SQ_NORMS = 2  # two numbers per parameter, of each fold and of all: ctx.step.gradients.sq_norms
    ENTROPY_GRADIENT = 4 | FOLD_GRADIENTS  # ctx.prediction, as far as the next two ask for more
    ENTROPY_CHANGE = 8 | ENTROPY_GRADIENT  # its quantities, for which δθ of the step before is kept
    ENTROPY_ROWS = 16 | ENTROPY_GRADIENT  # its rows: one more such vector per fold
    LOSS_CHECK = 32  # now and then a fold's gradient anew: ctx.limits.other_terms does not rest on the loop's word

"""What a training's configuration will measure and what it will not, said once when it begins."""

from __future__ import annotations

import torch

from rl_training.engine.open_step import Loop
from rl_training.engine.optimizer import view_optimizer
from rl_training.engine.precision import named
from rl_training.engine.probe import Need
from rl_training.engine.requirements import Requirements
from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.estimate import FEWEST_FOLDS
from rl_training.mathematics.folds import ENOUGH

MORE_FOLDS = "smaller microbatches, or num_folds={enough} of a probe, whose folds cost a further pass each"

ROUNDED = (
    "steps are rounded: {which}; update/surviving_share says how much of each is left. Weights in float32, under bf16 "
    "autocast, lose nothing"
)
NO_DECAY = (
    "Adam's second moment never decays: it is kept in {dtype}, in which {beta2} times a number is that number. Where "
    "gradients become smaller, steps stay small: use adam_beta2=0.99, or weights in float32"
)


def announcement(loop: Loop, requirements: Requirements) -> tuple[str, list[str]]:
    """Returns what will be measured, in a sentence, and what will not and which setting would change that."""
    shape, layout = loop.shape, loop.shard.layout
    folds = requirements.folds(shape, shape.sizes)
    count, vectors = folds[-1].folds.stop, requirements.num_vectors(folds[-1].folds.stop)
    size = layout.num_entries * layout.dtype.itemsize / 1e6
    plan = (
        f"probes measure {count} folds of whole prompts a step, from {shape.microbatches} microbatches of "
        f"{shape.microbatch_size} sequences on each of {shape.num_ranks} processes, and keep {vectors} vectors of "
        f"{size:.1f} MB on this one"
    )
    if loop.loss_settings is not None and loop.loss_settings.correction is not None:
        plan += f". The loss corrects for the sampler: {loop.loss_settings.correction}"
    missing = []
    more = MORE_FOLDS.format(enough=ENOUGH * -(-shape.num_ranks * shape.microbatches // ENOUGH))
    if Need.ENTROPY_GRADIENT in requirements.needs:
        if count < 2:
            missing.append(f"no prediction: a step is one fold, and none can be left out of it; use {more}")
        elif count < FEWEST_FOLDS:
            missing.append(f"no error bars: {count} folds are too few; use {more}")
        elif count < ENOUGH:
            missing.append(f"uncertain error bars: they come from {count} folds; for {ENOUGH} use {more}")
        optimizer = view_optimizer(loop.shard)
        missing += [f"no prediction before the step: {optimizer.reason}"] if optimizer.reason else []
        missing += [ROUNDED.format(which=optimizer.rounded)] if optimizer.rounded else []
        adam = [state for state in (optimizer.states or {}).values() if isinstance(state, AdamWState)]
        stuck = [state for state in adam if 1.0 - state.betas[1] < torch.finfo(state.exp_avg_sq.dtype).eps / 2.0]
        missing += [NO_DECAY.format(dtype=named(state.exp_avg_sq.dtype), beta2=state.betas[1]) for state in stuck[:1]]
    missing += [f"no entropy gradient: {loop.sampling_mismatch}"] if loop.sampling_mismatch else []
    missing += [f"rounded: {loop.shard.why_rounded}"] if loop.shard.why_rounded else []
    return plan, missing

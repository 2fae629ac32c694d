"""What a training's configuration will measure and what it will not, said once when it begins."""

from __future__ import annotations

from rl_training.engine.open_step import Loop
from rl_training.engine.optimizer import view_optimizer
from rl_training.engine.probe import Need
from rl_training.engine.requirements import Requirements
from rl_training.mathematics.estimate import FEWEST_FOLDS
from rl_training.mathematics.folds import ENOUGH
from rl_training.mathematics.vectors import Layout

MORE_FOLDS = "smaller microbatches, or num_folds={enough} of a probe, whose folds cost a further pass each"


def announcement(loop: Loop, requirements: Requirements, layout: Layout) -> tuple[str, list[str]]:
    """Returns what will be measured, in a sentence, and what will not and which setting would change that."""
    shape = loop.shape
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
        reason = view_optimizer(loop.shard).reason
        missing += [f"no prediction before the step: {reason}"] if reason else []
    missing += [f"no entropy gradient: {loop.sampling_mismatch}"] if loop.sampling_mismatch else []
    missing += [f"rounded: {loop.shard.why_rounded}"] if loop.shard.why_rounded else []
    return plan, missing

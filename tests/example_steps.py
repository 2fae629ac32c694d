"""Steps made by hand, for claims that need no trainer: one on-policy step of a loop that can be asked everything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rl_training.engine.batch import Batch, Rollout
from rl_training.engine.capabilities import Capabilities
from rl_training.engine.entropy_change import measure_entropy_change
from rl_training.engine.loss_weights import LossWeights
from rl_training.engine.memory import StepMemory
from rl_training.engine.policy import Policy
from rl_training.engine.probe import Need
from rl_training.engine.ranks import Ranks
from rl_training.engine.step import Gradients, OptimizerView, Step
from rl_training.mathematics.folds import ranges_of
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import Vector

ALONE = Ranks(1, lambda tensor: tensor)


def step_of(
    number: int,
    rollout: Rollout,
    scores: Scores,
    loss_weights: Tensor,
    microbatches: int,
    parameters: Mapping[str, nn.Parameter],
    mean: Mapping[str, Tensor],
    policy: Policy,
    *,
    states: Any = None,
    rows: Vector | None = None,
    sq_norms: Tensor | None = None,
    memory: StepMemory | None = None,
    ranks: Ranks = ALONE,
) -> Step:
    """Returns a step in as many microbatches of equal size, each of them a fold; with a memory, and its ΔH."""
    size = rollout.num_sequences // microbatches
    fold = rollout.prompt_index.new_tensor(range(microbatches)).repeat_interleave(size)
    batch = Batch(
        rollout=rollout,
        scores=scores,
        loss_weights=LossWeights(loss_weights, None),
        microbatch_rows=ranges_of([size] * microbatches),
        fold=fold,
        responses_per_prompt=int((rollout.prompt_index == rollout.prompt_index[0]).sum()),
        rollout_number=0,
    )
    step = Step(
        number=number,
        batch=batch,
        gradients=Gradients(parameters, mean, rows, microbatch_sq_norms=sq_norms),
        optimizer=OptimizerView(states, math.inf),
        policy=policy,
        ranks=ranks,
        num_folds=microbatches * ranks.count,
        num_sequences=rollout.num_sequences * ranks.count,
        capabilities=Capabilities(),
    )
    if memory is None:
        return step
    return dataclasses.replace(step, first_order=measure_entropy_change(step, memory, Need.ENTROPY_CHANGE))

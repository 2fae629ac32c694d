"""Steps made by hand, for claims that need no trainer: one on-policy step of a loop that can be asked everything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rl_training.engine.batch import Batch, Rollout
from rl_training.engine.capabilities import Capabilities
from rl_training.engine.entropy_change import StepMemory
from rl_training.engine.loss_weights import LossWeights
from rl_training.engine.policy import Policy
from rl_training.engine.step import Gradients, OptimizerView, Ranks, Step
from rl_training.mathematics.folds import ranges_of
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import Vector

ALONE = Ranks(1, lambda tensor: tensor)


def capabilities(**changes: Any) -> Capabilities:
    """Returns what is known of a step of which everything can be measured, but for these changes."""
    able: dict[str, Any] = {
        "sampling_mismatch": "", "no_fresh_responses": "", "no_formula": "", "complete_prompts": True,
        "whole_prompts": True, "folds_of_gradient": True, "num_folds": 8, "reused": False,
        "other_terms": False, "dr_grpo": True, "first_of_adam": False,
    }  # fmt: skip
    return Capabilities(**able | changes)


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
    """Returns a step in as many microbatches of equal size, each of them a fold."""
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
    known = capabilities(num_folds=microbatches * ranks.count)
    gradients = Gradients(parameters, mean, rows, sq_norms)
    return Step(number, batch, gradients, OptimizerView(states, math.inf), policy, ranks, known, memory)

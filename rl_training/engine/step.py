"""What a probe sees of a training step: frozen views of the microbatches, of the optimizer and of the whole step.

For the letters in shapes see rollout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.sgd import SGDState
from rl_training.mathematics.vectors import FlatVectors
from rl_training.step.loss_weights import LossWeights
from rl_training.step.policy import Policy
from rl_training.step.rollout import Rollout


@dataclass(frozen=True)
class Microbatch:
    """One forward pass and backward of the training loop. `scores` is None until the forward pass is done."""

    index: int  # 0 .. K-1 within the optimizer step
    rollout: Rollout  # its B sequences
    scores: Scores | None


@dataclass(frozen=True)
class OptimizerView:
    """The optimizer as it stands before the step: hyperparameters and states, by parameter name.

    `states` is None where there is no formula for the step, with the reason in `reason`.
    """

    states: Mapping[str, AdamWState | SGDState] | None
    max_grad_norm: float  # gradient clipping threshold; inf when there is none
    reason: str = ""


@dataclass(frozen=True)
class StepContext:
    """One optimizer step on this rank, complete from `on_pre_optimizer_step` on.

    What a probe wants to know beyond these fields it asks of `policy`. `reduce(tensor)` sums a small tensor over the
    ranks: call it on all or on none.
    """

    step: int  # counted from 1: the `step` of the log line that this optimizer step will have
    parameters: Mapping[str, nn.Parameter]  # trainable only
    gradients: Mapping[str, Tensor]  # mean over microbatches and ranks, before clipping, as the optimizer gets it
    fold_gradients: FlatVectors | None  # row k is the mean gradient of fold k of this rank; only of whole prompts
    microbatch_sq_norms: Tensor | None  # (K, parameters, 2) fp64: |g_k|² and Σ P g_k², in the order of `parameters`
    optimizer: OptimizerView
    rollout: Rollout
    scores: Scores
    loss_weights: LossWeights
    other_terms: bool  # the loss has terms beside log-probabilities and entropies (the auxiliary one of experts)
    microbatch_rows: tuple[range, ...]  # the rows of `rollout` that each microbatch holds
    fold: Tensor  # (B,), the fold that each sequence is in, 0 .. number of folds - 1: folds hold whole prompts
    sampled_otherwise: str  # why the sequences are no samples of the policy that is scored (top-p); "" if they are
    no_fresh_responses: str  # why `policy.sample` is not to be asked; "" if it may be
    rollout_number: int  # of this training's rollouts, the one that the step learns from
    reused: bool  # an earlier optimizer step has already learned from some of these sequences
    learned_again: bool  # several steps learn from each sequence: num_iterations > 1
    autocast: bool  # training's gradients are computed in bf16
    responses_per_prompt: int
    complete_prompts: bool  # on every rank, every prompt of the step is there with all its G responses
    whole_prompts: bool  # and lies in one microbatch, on every rank
    dr_grpo: bool  # the loss is Dr-GRPO's: −A ∂log π summed over all tokens on one scale, A = reward − group's mean
    num_ranks: int
    reduce: Callable[[Tensor], Tensor]
    policy: Policy

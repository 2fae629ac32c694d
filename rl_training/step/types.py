"""What a probe sees of a training step: frozen views of the rollout, the microbatches and the optimizer.

Shape legend, used in every comment of this package:
    B  sequences (of a microbatch, or of the whole step on this rank)
    P  prompt tokens, left-padded
    T  completion tokens, right-padded; the end-of-sequence token counts, padding never
    G  responses per prompt
    K  microbatches of an optimizer step on this rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor, nn

from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.sgd import SGDState
from rl_training.mathematics.vectors import GradientBuffer


@dataclass(frozen=True)
class Rollout:
    """Sequences sampled from the policy, with what the policy said of them. Everything is detached."""

    prompt_ids: Tensor  # (B, P)
    prompt_mask: Tensor  # (B, P), 1 on tokens
    completion_ids: Tensor  # (B, T)
    completion_mask: Tensor  # (B, T), 1 on sampled tokens
    advantages: Tensor  # (B,)
    rewards: Tensor | None  # (B,), weighted sum over the reward functions; None for sequences that were not rewarded
    prompt_index: Tensor  # (B,), equal for responses of the same prompt, different for different prompts
    sampling_logps: Tensor | None  # (B, T) when it was sampled; None where TRL does not keep them
    on_policy: bool  # sampled at the very parameters that this optimizer step starts from

    @property
    def num_sequences(self) -> int:
        return self.completion_ids.shape[0]


@dataclass(frozen=True)
class Microbatch:
    """One forward and backward of the training loop. `scores` is None until the forward is done."""

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

    `score(rows)` runs the unwrapped model on some rows of `rollout` at the present parameters, WITH graph, padded to
    the longest of these rows only. `reduce(tensor)` sums a small tensor over the ranks: call it on all or on none.
    `sample(num_sequences, seed)` gives this rank's share of so many fresh responses, one each to random prompts of the
    training set, and `score_rollout(rollout)` scores any rollout without graph, autocast and dropout. Both speak of the
    parameters at the moment of the call, and training never notices: see sampling.py. `shifted(shift)` is a context in
    which the parameters are moved by so much; then they are back, bit for bit. `decode(ids)` gives text.
    """

    step: int  # counted from 1: the `step` of the log line that this optimizer step will have
    parameters: Mapping[str, nn.Parameter]  # trainable only
    gradients: Mapping[str, Tensor]  # mean over microbatches and ranks, before clipping, as the optimizer gets it
    fold_gradients: GradientBuffer | None  # row k is the mean gradient of fold k of this rank; only of whole prompts
    microbatch_sq_norms: Tensor | None  # (K, parameters, 2) fp64: |g_k|² and Σ P g_k², in the order of `parameters`
    optimizer: OptimizerView
    rollout: Rollout
    scores: Scores
    loss_weights: Tensor  # (B, T), ∂loss/∂log-probability: this rank's gradient is their sum over loss_weights·∂logp
    microbatch_rows: tuple[range, ...]  # the rows of `rollout` that each microbatch holds
    fold: Tensor  # (B,), the fold that each sequence is in, 0 .. number of folds - 1: folds hold whole prompts
    reused: bool  # an earlier optimizer step has already learned from some of these sequences
    responses_per_prompt: int
    complete_prompts: bool  # on every rank, every prompt of the step is there with all its G responses
    whole_prompts: bool  # and lies in one microbatch, on every rank
    dr_grpo: bool  # the loss is Dr-GRPO's: −A ∂log π summed over all tokens on one scale, A = reward − group's mean
    num_ranks: int
    score: Callable[[Tensor], Scores]
    shifted: Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]
    decode: Callable[[Tensor], str]
    reduce: Callable[[Tensor], Tensor]
    sample: Callable[[int, int], Rollout]
    score_rollout: Callable[[Rollout], Scores]

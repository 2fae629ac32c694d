"""All sequences of one optimizer step on a rank, and the settings of the loss.

For the letters in shapes see policy/rollout.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.folds import FoldGroup, FoldSource
from rl_training.step.loss_weights import LossWeights


@dataclass(frozen=True)
class Correction:
    """A loss's factor on each token: the ratio ρ = π/μ of policy to sampler, truncated or masked.

    Args:
        per_sequence: ρ is the ratio of the whole response instead of the token.
        masks: A ratio outside the bounds becomes 0 instead of being truncated to them.
        low, high: The bounds of ρ.
    """

    per_sequence: bool = False
    masks: bool = False
    low: float = 0.0
    high: float = math.inf

    def factors(self, log_ratios: Tensor) -> Tensor:
        """Return the factors, (B, T).

        Args:
            log_ratios: (B, T), log π − log μ; 0 off the loss's tokens.
        """
        ratios = self.ratios(log_ratios)
        if self.masks:
            return ratios.masked_fill((ratios < self.low) | (ratios > self.high), 0.0)
        return ratios.clamp(self.low, self.high)

    def ratios(self, log_ratios: Tensor) -> Tensor:
        """Return the ratios before the bounds are applied, (B, T)."""
        if self.per_sequence:
            log_ratios = log_ratios.sum(dim=1, keepdim=True).expand_as(log_ratios)
        return log_ratios.exp()

    def __str__(self) -> str:
        bounds = " and ".join(
            f"{word} {bound:g}"
            for word, bound, none in (("at least", self.low, 0.0), ("at most", self.high, math.inf))
            if bound != none
        )
        kind = "mask" if self.masks else "truncation"
        return f"ratios of {'responses' if self.per_sequence else 'tokens'}, {kind}: {bounds or 'no bounds'}"


@dataclass(frozen=True)
class LossSettings:
    """The settings of a loss. Dr-GRPO's: −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A), summed over tokens, / (b L)."""

    max_length: int  # L
    epsilon_low: float
    epsilon_high: float
    hides_truncated: bool  # the loss leaves truncated responses out
    correction: Correction | None = None  # for a sampler other than the policy; None: no ratios to the sampler
    differs: frozenset[str] = frozenset()  # names of the host's settings that differ from Dr-GRPO's

    @property
    def is_dr_grpo(self) -> bool:
        """Whether the loss is exactly Dr-GRPO's, on all responses, without a further factor on any."""
        return not self.differs and not self.hides_truncated and self.correction is None


@dataclass(frozen=True)
class Copies:
    """Which groups of responses of a step are copies of each other (engine/copied_groups.py)."""

    unit: Tensor | None = None  # (B,), like prompt_index, but equal for a group and its copies; None: no copies
    response: Tensor | None = None  # (B,), a number, equal for a response and its copies; None: no copies
    on_several_ranks: bool = False  # some copies of a group lie on another rank: nothing on a rank is independent
    reason: Unavailable | None = None  # says how many groups are distinct; None: all

    @property
    def across_ranks_reason(self) -> Unavailable | None:
        """The reason why no rank's prompts are independent of another's."""
        return self.reason if self.on_several_ranks else None

    def units(self, rollout: Rollout) -> Tensor:
        """Return a number for each of this rank's sequences, (B,), equal for the responses to a prompt and copies."""
        return rollout.prompt_index if self.unit is None else self.unit


NO_COPIES = Copies()


@dataclass(frozen=True)
class Batch:
    """All sequences of one optimizer step on this rank, and how they are divided into microbatches and folds."""

    rollout: Rollout
    scores: Scores  # from training's own forward passes, without graph
    loss_weights: LossWeights
    microbatch_rows: tuple[range, ...]  # the rows of each microbatch
    fold_groups: Sequence[FoldGroup]  # the folds, of whole prompts, over all ranks
    fold: Tensor  # (B,), the fold of each sequence
    fold_sizes: Tensor  # (K,) fp64 in host memory, n_k: sequences on all ranks
    responses_per_prompt: int  # G
    fold_source: FoldSource
    loss_settings: LossSettings | None = None  # None if unknown
    copies: Copies = NO_COPIES

    @property
    def num_folds(self) -> int:
        """K, over all ranks."""
        return len(self.fold_sizes)

    @property
    def num_sequences(self) -> float:
        """Σ n_k, over all ranks. `rollout.num_sequences` counts this rank's."""
        return float(self.fold_sizes.sum())

    def log_ratios(self) -> Tensor | None:
        """Return log π − log μ per token, (B, T) fp64, 0 off the mask. None if unknown.

        All are 0 if the policy itself sampled. A token of which the sampler gave no log-probability (nan) has 0: losses
        take its ratio for 1.
        """
        rollout = self.rollout
        scores = self.scores
        if rollout.has_unknown_sampler:
            return None
        if rollout.sampling_logps is None:
            return torch.zeros_like(rollout.completion_mask, dtype=torch.float64)
        sampling_logps = rollout.sampling_logps.double()
        difference = scores.logps.double() - sampling_logps
        return difference.masked_fill((scores.mask == 0) | sampling_logps.isnan(), 0.0)

    def sum_by_prompt(self, values: Tensor) -> Tensor:
        """Return the sum of `values` (B, …) over this rank's responses to each of its prompts, (prompts, …).

        Copies of a group count with it, as one prompt.
        """
        prompts, prompt_of_row = self.copies.units(self.rollout).unique(return_inverse=True)
        return values.new_zeros(len(prompts), *values.shape[1:]).index_add_(0, prompt_of_row, values)

    def sum_by_fold(self, values: Tensor) -> Tensor:
        """Return the sum of `values` (B, …) over this rank's sequences of each fold, (K, …)."""
        return values.new_zeros(self.num_folds, *values.shape[1:]).index_add_(0, self.fold, values)

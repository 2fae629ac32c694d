"""A step by its folds: the steps without each, the entropy gradient of each, and sums of their products with errors."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from rl_training.engine.capabilities import REUSED
from rl_training.engine.changed_steps import Direction
from rl_training.engine.entropy_gradients import fold_gradients
from rl_training.engine.step import Step
from rl_training.engine.updates import StepsWithoutFolds
from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR
from rl_training.mathematics.jackknife import jackknife_covariance
from rl_training.mathematics.running_pairs import Pair

FEW_FOLDS = f"it needs {MIN_FOLDS_FOR_STDERR} folds of prompts, and this step has fewer"


def why_no_folds(step: Step, off_policy: str) -> str:
    """Returns why there are no products by folds, with errors, "" if there are. A collective.

    off_policy  why not off-policy
    """
    known = step.capabilities
    if known.reused:
        return REUSED
    if not step.batch.rollout.on_policy:
        return off_policy
    reason = step.entropy_change.why_none or step.entropy_change.why_no_forward
    return reason or (FEW_FOLDS if known.num_folds < MIN_FOLDS_FOR_STDERR else "")


class StepByFolds:
    """What products with a step's changes are made of. Only where `why_no_folds` is "". A collective."""

    def __init__(self, step: Step) -> None:
        self._step, batch = step, step.batch
        self.sizes = torch.bincount(batch.fold).double()
        self._lengths = torch.zeros_like(self.sizes).index_add_(0, batch.fold, batch.scores.mask.sum(dim=1).double())
        self.without = self._steps_without()
        self.entropy = self._entropy_gradient()
        self._number_and_length = step.ranks.reduce(torch.stack([self.sizes.sum(), self._lengths.sum()]))

    @property
    def length(self) -> float:
        """The tokens of the step, over all ranks."""
        return float(self._number_and_length[1])

    def pair(self, own: Tensor, lost: Tensor) -> Pair:
        """Returns ΔH per token and Δreward per response of one change, from its products by fold. A collective.

        own, lost  (K, directions), as ChangedSteps.products has them, of X, or of X and the gradient of the reward
        """
        reduce, sizes = self._step.ranks.reduce, self.sizes.unsqueeze(1)
        by_fold = torch.cat([sizes, self._lengths.unsqueeze(1), sizes * own], dim=1)
        total = torch.cat([self._number_and_length, reduce((sizes * own).sum(dim=0))])
        without = total - by_fold
        without[:, 2:] += lost
        values, covariance = _per_unit(total), jackknife_covariance(_per_unit, total, without, reduce)
        return Pair(values.cpu(), covariance.cpu(), self._step.capabilities.num_folds - 1)

    def _steps_without(self) -> StepsWithoutFolds:
        step, change = self._step, self._step.entropy_change
        assert step.gradients.rows is not None
        total = float(step.ranks.reduce(self.sizes.sum()))
        threshold = step.optimizer.max_grad_norm
        return StepsWithoutFolds(change.pieces, change.gradient, step.gradients.rows, self.sizes, total, threshold)

    def _entropy_gradient(self) -> Direction:
        """Returns E[T] ∂H_tok of each fold. A collective, of two numbers."""
        step, change = self._step, self._step.entropy_change
        batch, reduce, layout = step.batch, step.ranks.reduce, change.layout
        assert change.ratios is not None
        entropies = batch.scores.entropies.double().masked_fill(batch.scores.mask == 0, 0.0).sum()
        entropy, length = reduce(torch.stack([entropies, self._lengths.sum()])).tolist()
        settings = dataclasses.replace(change.settings, per_sequence=False, own_prompts=False)
        parameters = list(step.gradients.parameters.values())
        rows = layout.zeros(batch.num_folds)
        gradients = fold_gradients(batch, step.policy, parameters, layout, change.ratios, entropy / length, settings)
        for k, fold in enumerate(gradients):
            for part, x in zip(rows, fold.entropy[0], strict=True):
                part[k] = x
        return Direction(rows)


def _per_unit(sums: Tensor) -> Tensor:
    """Returns (..., 2): ΔH per token and Δreward per response, nan where that has no gradient.

    sums  (..., 2 + directions): responses, tokens, Σ n_k X_k · Δ_(−k), and perhaps Σ n_k J_k · Δ_(−k)
    """
    number, length = sums[..., 0:1], sums[..., 1:2]
    values = sums[..., 2:] / torch.cat([length, number], dim=-1)[..., : sums.shape[-1] - 2]
    return nn.functional.pad(values, (0, 2 - values.shape[-1]), value=torch.nan)

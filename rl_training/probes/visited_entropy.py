"""The entropy of the scored policy on the prefixes that were visited, where these are no samples of that policy.

    visited_prefixes            Σ h / Σ T            nats per token
    visited_prefixes_sequence   Σ h / N              nats per sequence

h is exact at every prefix, whoever chose it; which prefixes are visited, and how often, the cut or penalised policy
decides. So this is no H_tok or H_seq of either policy: of one that samples by the temperature alone it would be.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_training.engine.entropy_change import levels_of_folds
from rl_training.engine.step import Step
from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR, Estimate
from rl_training.mathematics.jackknife import jackknife_stderr

NAMES = ("entropy/visited_prefixes", "entropy/visited_prefixes_sequence")


def visited_entropy(step: Step) -> dict[str, Estimate]:
    """Returns NAMES; delete-one-fold jackknife errors from MIN_FOLDS_FOR_STDERR folds on. A collective."""
    sequences = torch.ones(step.batch.rollout.num_sequences, dtype=torch.float64, device=step.batch.fold.device)
    of_fold = levels_of_folds(step.batch, sequences)

    def per_token_and_sequence(sums: Tensor) -> Tensor:
        count, entropy, length = sums.unbind(-1)
        return torch.stack([entropy / length, entropy / count], dim=-1)

    total = step.ranks.reduce(of_fold.sum(dim=0))
    num_folds = int(step.ranks.reduce(total.new_tensor(float(len(of_fold)))))
    values = per_token_and_sequence(total).tolist()
    stderrs = jackknife_stderr(per_token_and_sequence, total, total - of_fold, step.ranks.reduce).tolist()
    few = f"no error bar: it needs {MIN_FOLDS_FOR_STDERR} folds of whole prompts, the step has {num_folds}"
    return {
        name: Estimate(value, stderr, num_folds)
        if num_folds >= MIN_FOLDS_FOR_STDERR
        else Estimate(value, math.nan, num_folds, few)
        for name, value, stderr in zip(NAMES, values, stderrs, strict=True)
    }

"""If a hook cannot be set on one leaf, no hook stays on the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_training.parallel.fold_vectors import adding_to
from rl_training.parallel.sharding import Shard
from rl_training.step.fold_reduction import FoldReduction


def test_hooks_are_removed_where_one_of_them_cannot_be_set() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shard = Shard(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    model[1].bias.requires_grad_(False)
    reduction = FoldReduction(shard)
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        reduction.arm(adding_to(shard.layout.zeros(1)))
    assert not any(param._backward_hooks for param in model.parameters())


def test_hooks_on_reduced_gradients_are_removed_where_one_of_them_cannot_be_set() -> None:
    class Reducing(Shard):
        reduces_each_backward = True

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shard = Reducing(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    model[1].bias.requires_grad_(False)
    reduction = FoldReduction(shard)
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        reduction.arm(adding_to(shard.layout.zeros(1)), consume=True)
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())

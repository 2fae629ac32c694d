"""Which interventions share a basis: further weights on the same scores, of which each of them is a multiple.

    w = (1 + a) plain + b basis

PSR, NSR and W-REINFORCE with any λ are one basis, a bonus with any β another; the loss scaled as a whole needs none.
This is detected from the weights, so no intervention has to declare it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_training.engine.changed_steps import Change
from rl_training.engine.loss_weights import LossWeights

ROUNDING = 1e-11  # of a sum of squares of weights in fp32: what they may be off a multiple


@dataclass(frozen=True)
class Group:
    """Interventions with one basis."""

    basis: LossWeights | None  # (B, T); None where no further weights are needed
    changes: dict[str, Change] = field(default_factory=dict)  # by name of the intervention


def groups_of(
    changed: Mapping[str, Sequence[LossWeights]],
    plain: LossWeights,
    microbatch_rows: Sequence[range],
    reduce: Callable[[Tensor], Tensor],
) -> list[Group]:
    """Returns the interventions in groups, the one without a basis first. A collective: the same groups on all ranks.

    changed  by intervention, the new weights of each microbatch        plain  the weights of all microbatches, (B, T)
    """
    groups = [Group(None)]
    plain_weights = _stacked(plain)
    for name, parts in changed.items():
        further = _difference(parts, microbatch_rows, plain_weights)
        for group in groups:
            basis = [] if group.basis is None else [_stacked(group.basis)]
            shares = multiples(further, [plain_weights, *basis], reduce)
            if shares is not None:
                group.changes[name] = Change(*shares)
                break
        else:
            logps, entropies = further
            basis_weights = LossWeights(logps, entropies if entropies.any() else None)  # without: no backward for them
            groups.append(Group(basis_weights, {name: Change(0.0, 1.0)}))
    return groups


def multiples(weights: Tensor, others: Sequence[Tensor], reduce: Callable[[Tensor], Tensor]) -> list[float] | None:
    """Returns the factors with which weights are a sum of multiples of others; None if they are not. A collective.

    >>> one, two = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 0.0])
    >>> [round(factor, 9) for factor in multiples(3 * one - two, [one, two], lambda x: x)]
    [3.0, -1.0]
    """
    vectors = torch.stack([vector.double().flatten() for vector in (*others, weights)])
    products = reduce(vectors @ vectors.T)
    gram, with_weights, square = products[:-1, :-1], products[:-1, -1], products[-1, -1]
    scale = gram.diagonal().sqrt().where(gram.diagonal() > 0, 1.0)
    factors = torch.linalg.pinv(gram / scale / scale.unsqueeze(1), hermitian=True) @ (with_weights / scale) / scale
    rest = square - factors @ with_weights
    return factors.tolist() if float(rest) <= ROUNDING * float(square) else None


def _stacked(weights: LossWeights) -> Tensor:
    """Returns weights of log-probabilities and of entropies as one, (2, B, T)."""
    entropies = torch.zeros_like(weights.logps) if weights.entropies is None else weights.entropies
    return torch.stack([weights.logps, entropies])


def _difference(parts: Sequence[LossWeights], microbatch_rows: Sequence[range], plain: Tensor) -> Tensor:
    """Returns the weights of all microbatches less the plain ones, (2, B, T)."""
    further = torch.zeros_like(plain)
    for part, rows in zip(parts, microbatch_rows, strict=True):
        own = slice(rows.start, rows.stop)
        further[:, own] = _stacked(part) - plain[:, own]
    return further

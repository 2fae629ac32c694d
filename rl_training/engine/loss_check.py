"""Detect, from a loss's graph, terms that do not go through the policy's scores.

    gradient of the step = Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik + gradient of other terms

Other terms reach the model by another path than the scores: the auxiliary loss of a mixture of experts, a supervised
loss on other sequences, a penalty on weights. No setting lists them all. If the loss is at hand, its graph shows them
at every microbatch, without any computation. Otherwise gradient_check.py detects them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from rl_training.policy.scores import Scores
from rl_training.step.batch import LossSettings


@dataclass(frozen=True)
class LossInfo:
    """What a loop tells about the loss that it makes from a microbatch's scores."""

    value: Tensor | None = None  # the loss itself; None if the loop computes it later
    settings: LossSettings | None = None  # the current ones; None if unchanged since training began
    other_terms: bool = False  # the loop knows of terms besides the scores

    def has_other_terms(self, scores: Scores, leaves: Iterable[Tensor]) -> bool:
        """Return whether the loss is known to reach one of these parameters by another path than the scores."""
        return self.other_terms or (self.value is not None and has_other_terms(self.value, scores, leaves))


def has_other_terms(loss: Tensor, scores: Scores, leaves: Iterable[Tensor]) -> bool:
    """Return whether the loss reaches a leaf by another path than these scores.

    It walks the graph between the loss and the scores, some hundred nodes. A path around the scores leads to a leaf.

    >>> import torch
    >>> w = torch.ones(1, 1, requires_grad=True)
    >>> scores = Scores(2 * w, 3 * w, torch.ones(1, 1))
    >>> loss = (scores.logps * scores.entropies).sum()
    >>> has_other_terms(loss, scores, [w]), has_other_terms(loss + (w - 1).square().sum(), scores, [w])
    (False, True)
    """
    score_outputs = {
        (score.grad_fn, score.output_nr) for score in (scores.logps, scores.entropies) if score.grad_fn is not None
    }
    leaf_ids = {id(leaf) for leaf in leaves}
    pending, visited = [(loss.grad_fn, loss.output_nr)], set()
    while pending:
        node, output = pending.pop()
        if node is None or (node, output) in score_outputs or node in visited:
            continue
        visited.add(node)
        if id(getattr(node, "variable", None)) in leaf_ids:
            return True
        pending.extend(node.next_functions)
    return False

"""What a loop tells about its loss, and terms in the loss's graph that do not go through the policy's scores.

    gradient of the step = Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik + gradient of other terms

Other terms reach the model by another path than the scores: the auxiliary loss of a mixture of experts, a supervised
loss on other sequences, a penalty on weights. No setting lists them all. If the loss is at hand, its graph shows them
at every microbatch, without any computation. Otherwise terms_check.py detects them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from rl_training.policy.scores import Scores
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import LossSettings

OTHER_TERMS = Unavailable(
    "other_terms",
    "the loss has a term besides log-probabilities and entropies (the auxiliary loss of a mixture of experts, a loss "
    "on other sequences), whose share per response is not known",
)
OWN_FORWARD_PASS = Unavailable(
    "own_forward_pass",
    "the loss is computed from a forward pass of its own, so how it weights the tokens is not known",
)


@dataclass(frozen=True)
class LossInfo:
    """What a loop tells about the loss that it makes from a microbatch's scores."""

    value: Tensor | None = None  # the loss itself; None if the loop computes it later
    settings: LossSettings | None = None  # the current ones; None if unchanged since training began
    other_terms: bool = False  # the loop knows of terms besides the scores

    def other_terms_reason(self, scores: Scores, leaves: Iterable[Tensor]) -> Unavailable | None:
        """Return the reason why the loop, or the loss's graph, tells of a term besides these scores, or None."""
        if self.other_terms:
            return OTHER_TERMS
        return None if self.value is None else other_terms_in_graph(self.value, scores, leaves)


def other_terms_in_graph(loss: Tensor, scores: Scores, leaves: Iterable[Tensor]) -> Unavailable | None:
    """Return the reason why the loss reaches a leaf by another path than these scores, or None.

    It walks the graph between the loss and the scores, some hundred nodes. A path around the scores leads to a leaf. If
    no path leads through the scores, the loss is made of another forward pass.

    >>> import torch
    >>> w = torch.ones(1, 1, requires_grad=True)
    >>> scores = Scores(2 * w, 3 * w, torch.ones(1, 1))
    >>> loss = (scores.logps * scores.entropies).sum()
    >>> reasons = (other_terms_in_graph(value, scores, [w]) for value in (loss, loss + (w - 1).sum(), (2 * w).sum()))
    >>> [reason and reason.code for reason in reasons]
    [None, 'other_terms', 'own_forward_pass']
    """
    score_outputs = {
        (score.grad_fn, score.output_nr) for score in (scores.logps, scores.entropies) if score.grad_fn is not None
    }
    leaf_ids = {id(leaf) for leaf in leaves}
    pending = [(loss.grad_fn, loss.output_nr)]
    visited = set()
    reaches_scores = reaches_leaf = False
    while pending:
        node, output = pending.pop()
        if (node, output) in score_outputs:
            reaches_scores = True
        elif node is not None and node not in visited:
            visited.add(node)
            reaches_leaf |= id(getattr(node, "variable", None)) in leaf_ids
            pending.extend(node.next_functions)
        if reaches_scores and reaches_leaf:
            return OTHER_TERMS
    return OWN_FORWARD_PASS if reaches_leaf else None

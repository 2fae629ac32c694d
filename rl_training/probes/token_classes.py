"""The token classes probe: which of the step's tokens move entropy.

The part of a step that comes from its fresh gradient is linear in that gradient, and the gradient is a sum over tokens.
So this part of δH is a sum over classes of tokens:

    δH of a class c   Σ_k n_k X_k · a_(−k) ∘ g_(−k)^c / Σ T,      g^c = Σ_{t in c} c_t ∂log π_t + d_t ∂h_t

As in `simple`, each fold of whole prompts is multiplied with the step of the other folds. c_t and d_t are the loss's
weights of a token. a_(−k) is the optimizer's factor on the gradient in the step without fold k: AdamW's
−lr P (1−β1)/(1−β1^t), clipping included. The classes of one kind hold each token once, so they add up to
`delta_h/part/gradient`. The error is the delete-one-fold jackknife's. It takes the step as given: the variation of the
step itself between batches is not included.

The result is a class's share of this step's own gradient. It is not the effect of training without these tokens: a
warm Adam step is momentum to a share of β1, and P depends on all tokens. The cost is a forward pass over the sequences
with any weight in the loss, and for each kind a backward per class, less one; and for single tokens of the vocabulary
(probes/top_tokens.py) 2 forward passes per fold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.engine.probe import Probe, Reading
from rl_training.options import check_flag, check_num_folds
from rl_training.probes import top_tokens as single_tokens
from rl_training.probes.top_tokens import TokenSums
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.running_pairs import Pair, RunningPair
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.needs import Need
from rl_training.step.reasons import NO_TOKENS

CLASSES = {  # of each kind; the index of a class is its number
    "entropy": ("lower_half", "middle", "top_fifth"),
    "position": ("first_quarter", "second_quarter", "third_quarter", "last_quarter"),
    "advantage": ("positive", "negative", "zero"),
    "text": ("end", "tag", "number", "word", "sign", "space"),
}
QUANTILES = (0.5, 0.8)  # of entropy, the boundaries of its classes
DECAY = 0.9  # weight of an optimizer step, measured or not, relative to the next one in the means
TAG = re.compile(r"<[^<>\s]+>")
BY_SIGN = Unavailable(
    "goes_by_sign", "the step takes only the gradient's signs, as Adam's first does: no class has a share in it"
)
OFF_POLICY = Unavailable(
    "off_policy_classes",
    "off-policy: a class's share is not weighted by importance ratios",
    fix="use one step per rollout",
)
NO_TEXT = Unavailable(
    "no_text", "how tokens are decoded is not known", fix="give measured_loop(..., decode=...), or verl a tokenizer"
)


class TokenClassesProbe(Probe):
    """Splits the fresh gradient's part of δH among classes of tokens. See the module's docstring.

    Args:
        every: Measure each `every`-th step.
        num_folds: Folds of whole prompts, over all ranks. None: as many as the other probes use.
        top_tokens: Also find the ten tokens of the vocabulary that take most entropy.
    """

    name = "token_classes"
    needs = Need.FOLD_ENTROPY_GRADIENTS
    takes_num_folds = True

    def __init__(self, every: int = 10, num_folds: int | None = None, top_tokens: bool = True) -> None:
        super().__init__(every)
        check_num_folds("token_classes", num_folds)
        check_flag("token_classes: top_tokens", top_tokens)
        self.num_folds, self.top_tokens = num_folds, top_tokens

    def init(self) -> dict[str, Any]:
        """Return an empty mean over steps for each class, and empty sums by token for each half of the steps."""
        means = {f"{kind}/{name}": RunningPair() for kind, names in CLASSES.items() for name in names}
        return {**means, **{single_tokens.key(half): TokenSums() for half in (0, 1)}}

    def measure(self, ctx: StepContext, state: dict[str, Any]) -> Reading:
        kinds = self.kinds(ctx)
        sums = {kind: _sums(ctx, kind, classes) for kind, classes in kinds.items()}
        reason = ctx.effects_reason(OFF_POLICY)
        if not reason:
            reason = BY_SIGN if ctx.step.optimizer.has_sign_based_step else ctx.reasons.other_terms
        pairs = {} if reason else _pairs(ctx, kinds, sums)
        means = dict(state)
        no_tokens = reason or single_tokens.reason_of(ctx)
        predicted = dict[str, Estimate]()
        if self.top_tokens and no_tokens:
            predicted = dict.fromkeys(single_tokens.NAMES, Estimate.missing(no_tokens))
        elif self.top_tokens:
            means |= single_tokens.add_step(ctx, state)
            predicted = single_tokens.estimates(ctx, means)
        shares = dict[str, Estimate]()
        for kind, names in CLASSES.items():
            for index, name in enumerate(names):
                key = f"{kind}/{name}"
                step_estimate = mean_estimate = Estimate.missing(reason or NO_TEXT)
                if (kind, index) in pairs:
                    means[key] = means[key].add(pairs[kind, index], ctx.step.number, DECAY)
                    step_estimate = pairs[kind, index].estimate(0)
                    detail = {"measured_steps": means[key].num_steps}
                    mean_estimate = replace(means[key].mean().estimate(0), detail=detail)
                predicted |= {f"tokens/{key}/delta_h": step_estimate, f"tokens/{key}/mean_delta_h": mean_estimate}
                share = Estimate.missing(NO_TEXT if kind not in kinds else NO_TOKENS)
                if kind in kinds and sums[kind][0].any():
                    share = Estimate(float(sums[kind][0, index] / sums[kind][0].sum()))
                shares[f"tokens/{key}/share_of_tokens"] = share
        return Reading(predicted, shares, means)

    def kinds(self, ctx: StepContext) -> dict[str, Tensor]:
        """Return by kind the number of each token's class, (B, T); −1 off the mask. Collective."""
        batch, reduce = ctx.step.batch, ctx.ranks.reduce
        mask = batch.scores.mask != 0
        advantages = batch.rollout.advantages_of_tokens.expand_as(mask)
        kinds = {
            "entropy": entropy_classes(batch.scores.entropies, mask, reduce),
            "position": 4 * (mask.cumsum(dim=1) - 1) // mask.sum(dim=1, keepdim=True).clamp(min=1),
            "advantage": torch.where(advantages > 0, 0, torch.where(advantages < 0, 1, 2)),
        }
        ids = batch.rollout.completion_ids
        if ctx.policy.has_text:
            token_ids, inverse = ids[mask].unique(return_inverse=True)
            classes = [text_class(ctx.policy.decode(token)) for token in token_ids.cpu().unsqueeze(1)]  # one copy
            by_token = torch.tensor(classes, dtype=torch.long, device=ids.device)
            kinds["text"] = torch.zeros_like(ids).masked_scatter(mask, by_token[inverse])
        return {kind: classes.masked_fill(~mask, -1) for kind, classes in kinds.items()}

    def num_vectors(self, fold_vectors: float) -> float:
        """Return fold_vectors + 1: the gradient of one class, for each fold and over all."""
        return fold_vectors + 1.0


def entropy_classes(entropies: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Return for each entropy, (B, T), how many QUANTILES of all ranks' tokens it exceeds. Collective.

    A quantile is the smallest value that at least this share of the tokens does not exceed. Two histograms find it
    exactly for entropies in fp32. Floats that are not negative sort like their bits, so the first histogram counts the
    upper 16 bits, and the second the lower 16 bits of the entropies in the quantile's bin.

    >>> entropies = torch.tensor([[0.1, 0.9, 0.4, 0.2], [0.3, 0.0, 0.8, 9.9]])
    >>> entropy_classes(entropies, torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool(), lambda x: x).tolist()
    [[0, 2, 1, 0], [0, 0, 1, 2]]
    """
    entropies = entropies.float()
    bits = entropies[mask].clamp(min=0.0).view(torch.int32).long() % 2**31
    upper, lower = bits // 2**16, bits % 2**16
    up_to = reduce(torch.bincount(upper, minlength=2**15)).cumsum(dim=0)  # tokens in this bin or below
    ranks = (up_to.new_tensor(QUANTILES, dtype=torch.float64) * up_to[-1]).ceil().long()
    bins = torch.searchsorted(up_to, ranks)
    within = reduce(torch.stack([torch.bincount(lower[upper == number], minlength=2**16) for number in bins]))
    wanted = ranks - up_to[bins] + within.sum(dim=1)
    places = torch.searchsorted(within.cumsum(dim=1), wanted.unsqueeze(1)).squeeze(1)
    quantiles = (bins * 2**16 + places).int().view(torch.float32)
    return (entropies.unsqueeze(-1) > quantiles).sum(dim=-1)


def text_class(text: str) -> int:
    r"""Return the number of a token's class by its text. Special tokens decode to "", which is the class `end`.

    >>> [CLASSES["text"][text_class(text)] for text in ("", "</think>", " 12", "x2", "+", "\n")]
    ['end', 'tag', 'number', 'word', 'sign', 'space']
    """
    return CLASSES["text"].index(_name_of_text_class(text))


def _name_of_text_class(text: str) -> str:
    stripped = text.strip()
    if not stripped:
        return "space" if text else "end"
    if TAG.fullmatch(stripped):
        return "tag"
    if any(map(str.isalpha, stripped)):
        return "word"
    return "number" if any(map(str.isdigit, stripped)) else "sign"


def _pairs(ctx: StepContext, kinds: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> dict[tuple[str, int], Pair]:
    """Return ΔH of each class of each kind. Collective.

    The class with the most weight is the whole minus the others, which saves one backward per kind.
    """
    heaviest_class = {kind: int(table[1].argmax()) for kind, table in sums.items()}
    classes_with_weight = [
        (kind, index)
        for kind, table in sums.items()
        for index in table[1].nonzero().flatten().tolist()
        if index != heaviest_class[kind]
    ]
    weights = [ctx.step.batch.loss_weights.where(kinds[kind] == index) for kind, index in classes_with_weight]
    whole, shares = ctx.gradient_shares(weights)
    products = dict(zip(classes_with_weight, shares, strict=True))
    zeros = torch.zeros_like(whole)
    for kind in kinds:
        others = [product for (other, _), product in products.items() if other == kind]
        products[kind, heaviest_class[kind]] = whole - sum(others, zeros)
    classes = [(kind, index) for kind in kinds for index in range(len(CLASSES[kind]))]
    return {key: ctx.effect_of(products.get(key, zeros)) for key in classes}


def _sums(ctx: StepContext, kind: str, classes: Tensor) -> Tensor:
    """Return each class's tokens and the sum of their absolute weights, (2, classes), over all ranks. Collective."""
    parts = [part.double().abs() for part in vars(ctx.step.batch.loss_weights).values() if part is not None]
    is_token, count = classes >= 0, len(CLASSES[kind])
    sizes = torch.stack(parts).sum(dim=0)[is_token]
    columns = torch.stack([torch.ones_like(sizes), sizes])
    return ctx.ranks.reduce(columns.new_zeros(2, count).index_add_(1, classes[is_token], columns))

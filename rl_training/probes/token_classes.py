"""The probe of token classes: which of the step's tokens move entropy.

The part of a step that comes from its fresh gradient is linear in it, and the gradient is a sum over tokens. So is

    δH of a class c   Σ_k n_k X_k · a_(−k) ∘ g_(−k)^c / Σ T,      g^c = Σ_{t in c} c_t ∂log π_t + d_t ∂h_t

leave-fold-out over whole-prompt folds, as `simple` has it: c_t and d_t are the loss's weights of a token, a_(−k) is the
factor that the optimizer puts on the gradient in the step without fold k (AdamW's −lr P (1−β1)/(1−β1^t), clipping
included). Classes of one kind hold each token once: they add up to `delta_h/part/gradient`. The error is the
delete-one-fold jackknife's, which takes the step as given: that other batches would make other steps is not in it.

It is a share of this step's own gradient, not what training without these tokens would come to: a warm Adam step
consists of momentum to β1, and P holds all tokens. It costs a forward pass over the sequences whose loss has any
weight, and a backward for each class but one of a kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rl_training.engine.batch import Batch
from rl_training.engine.capabilities import OTHER_TERMS
from rl_training.engine.changed_steps import Basis, Direction, GradientParts, bases_of
from rl_training.engine.loss_weights import LossWeights
from rl_training.engine.probe import Need, Probe
from rl_training.engine.step import Step
from rl_training.engine.step_by_folds import StepByFolds, why_no_folds
from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR, Estimate
from rl_training.mathematics.running_pairs import Pair, RunningPair, RunningPairs

CLASSES = {  # of each kind, in the order of their numbers
    "entropy": ("lower_half", "middle", "top_fifth"),
    "position": ("first_quarter", "second_quarter", "third_quarter", "last_quarter"),
    "response": ("right", "wrong", "neither"),
    "text": ("end", "tag", "number", "word", "sign", "space"),
}
QUANTILES = (0.5, 0.8)  # of entropy, between its classes
MOST_ENTROPY = 32.0  # nats: of a vocabulary of 1e13
HALVINGS = 60  # of the range up to it, in which a quantile is looked for
DECAY = 0.9  # weight of a measured step relative to the next in the means
TAG = re.compile(r"<[^<>\s]+>")
FIRST = "Adam's first step goes by the gradient's signs alone: no class has a share in it"
OFF_POLICY = "off-policy: a class's share is not weighted by importance ratios; use one step per rollout"
NO_TEXT = "how tokens are decoded is not known: their ids come back"


class TokenClassesProbe(Probe):
    """Splits the fresh gradient's part of δH among classes of tokens. See the module's docstring.

    every      measure each `every`-th step
    num_folds  folds of whole prompts on each rank; None for what another probe says
    """

    name = "token_classes"
    needs = Need.ENTROPY_ROWS
    min_folds = MIN_FOLDS_FOR_STDERR

    def __init__(self, every: int = 20, num_folds: int | None = None) -> None:
        super().__init__(every)
        self.num_folds = num_folds
        classes = [f"{kind}/{name}" for kind, names in CLASSES.items() for name in names]
        self.running = RunningPairs({name: RunningPair(DECAY) for name in classes})

    def prepare(self, step: Step) -> None:
        kinds = self.kinds(step)
        sums = {kind: _sums(step, kind, classes) for kind, classes in kinds.items()}
        further = FIRST if step.capabilities.first_of_adam else OTHER_TERMS if step.capabilities.other_terms else ""
        why = why_no_folds(step, OFF_POLICY) or further
        pairs = {} if why else _pairs(step, kinds, sums)
        self._answers = {}
        for kind, names in CLASSES.items():
            for number, name in enumerate(names):
                pair, running = pairs.get((kind, number)), self.running[f"{kind}/{name}"]
                estimates = [Estimate.missing(why or NO_TEXT)] * 2
                if pair is not None:
                    mean = running.add(pair)
                    estimates = [pair.estimate(0), mean.estimate(0, f"measured steps: {running.steps}")]
                share = Estimate.missing(NO_TEXT)
                if kind in kinds:
                    share = Estimate(float(sums[kind][0, number] / sums[kind][0].sum()))
                metrics = [f"tokens/{kind}/{name}/{of}" for of in ("delta_h", "mean_delta_h", "share_of_tokens")]
                self._answers |= dict(zip(metrics, [*estimates, share], strict=True))

    def kinds(self, step: Step) -> dict[str, Tensor]:
        """Returns the number of each token's class, (B, T), −1 where no token is, by kind. A collective."""
        batch, reduce = step.batch, step.ranks.reduce
        mask = batch.scores.mask != 0
        advantages = batch.rollout.advantages.unsqueeze(1).expand_as(mask)
        kinds = {
            "entropy": entropy_classes(batch.scores.entropies, mask, reduce),
            "position": 4 * (mask.cumsum(dim=1) - 1) // mask.sum(dim=1, keepdim=True).clamp(min=1),
            "response": torch.where(advantages > 0, 0, torch.where(advantages < 0, 1, 2)),
        }
        ids = batch.rollout.completion_ids
        seen, place = ids[mask].unique(return_inverse=True)
        texts = [step.policy.decode(token) for token in seen.unsqueeze(1)]
        # Without a tokenizer what comes back of every token is its number.
        decoded = sum(str(token) not in text for token, text in zip(seen.tolist(), texts, strict=True))
        if float(reduce(torch.tensor(float(decoded), dtype=torch.float64, device=ids.device))):
            of_token = torch.tensor(list(map(text_class, texts)), dtype=torch.long, device=ids.device)
            kinds["text"] = torch.zeros_like(ids).masked_scatter(mask, of_token[place])
        return {kind: classes.masked_fill(~mask, -1) for kind, classes in kinds.items()}

    def num_vectors(self, num_folds: int) -> int:
        """The gradient of one class, by fold and over all folds."""
        return num_folds + 1


def entropy_classes(entropies: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns how many of the QUANTILES, of all ranks' tokens together, each entropy is above. A collective.

    A quantile is the smallest number that at least this share of the tokens does not exceed.

    >>> entropies = torch.tensor([[0.1, 0.9, 0.4, 0.2], [0.3, 0.0, 0.8, 9.9]])
    >>> entropy_classes(entropies, torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool(), lambda x: x).tolist()
    [[0, 2, 1, 0], [0, 0, 1, 2]]
    """
    values = entropies[mask].double()
    count = reduce(values.new_tensor(float(len(values))))
    shares = values.new_tensor(QUANTILES)
    low, high = torch.zeros_like(shares), torch.full_like(shares, MOST_ENTROPY)
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        is_above = reduce((values.unsqueeze(1) <= middle).sum(dim=0).double()) < shares * count
        low, high = torch.where(is_above, middle, low), torch.where(is_above, high, middle)
    return (entropies.unsqueeze(-1) > high).sum(dim=-1)


def text_class(text: str) -> int:
    """Returns the number of a token's class by its text: "" is the end, which special tokens are decoded to.

    >>> [CLASSES["text"][text_class(text)] for text in ("", "</think>", " 12", "x2", "+", "\\n")]
    ['end', 'tag', 'number', 'word', 'sign', 'space']
    """
    stripped = text.strip()
    if stripped:
        if TAG.fullmatch(stripped):
            return 1
        if any(map(str.isalpha, stripped)):
            return 3
        return 2 if any(map(str.isdigit, stripped)) else 4
    return 5 if text else 0


def _pairs(step: Step, kinds: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> dict[tuple[str, int], Pair]:
    """Returns ΔH of each class of each kind. A collective.

    The class with the most weight gets what the others leave of the whole: one backward less for each kind.
    """
    folds, change = StepByFolds(step), step.entropy_change
    known = (step.policy, list(step.gradients.parameters.values()), change.layout)
    most = {kind: int(of[1].argmax()) for kind, of in sums.items()}
    weighed = [(kind, c) for kind, of in sums.items() for c in of[1].nonzero().flatten().tolist() if c != most[kind]]
    weights = [weights_of(step.batch, kinds[kind] == c) for kind, c in weighed]

    def products(basis: Basis | None) -> Tensor:
        own, _ = GradientParts(change.steps_without, basis).products([None], [Direction(change.rows)])[0]
        return own

    found = {}
    for number, basis in bases_of(step.batch, *known, weights, step.ranks.reduce):
        found[weighed[number]] = products(basis)
    whole = products(None)
    for kind in kinds:
        rest = whole - sum(of for (of_kind, _), of in found.items() if of_kind == kind)
        found[kind, most[kind]] = rest
    nothing = torch.zeros_like(whole)
    every = [(kind, number) for kind in kinds for number in range(len(CLASSES[kind]))]
    return {of: folds.pair(found.get(of, nothing), nothing) for of in every}


def _sums(step: Step, kind: str, classes: Tensor) -> Tensor:
    """Returns (2, number of classes), over all ranks: the tokens of each, and the absolute sum of their weights."""
    parts = (part for part in vars(step.batch.loss_weights).values() if part is not None)
    sizes, there, count = sum(part.double().abs() for part in parts), classes >= 0, len(CLASSES[kind])
    columns = torch.stack([torch.ones_like(sizes[there]), sizes[there]])
    return step.ranks.reduce(columns.new_zeros(2, count).index_add_(1, classes[there], columns))


def weights_of(batch: Batch, there: Tensor) -> LossWeights:
    """Returns the weights of these tokens in the loss, and 0 for the others."""
    logps, entropies = batch.loss_weights.logps, batch.loss_weights.entropies
    return LossWeights(logps.where(there, 0.0), None if entropies is None else entropies.where(there, 0.0))

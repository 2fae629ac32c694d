"""Recorded steps of a real trainer, and a slow plain twin of the simple probe that recomputes them by definition.

Everything is float64. Vectors over parameters are flat, (P,), one parameter after another.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import reference
import torch
from seen import Kept
from torch import Tensor
from trainers import L_MAX

from rl_training import Estimate, Probe, Reading
from rl_training.models.load import load_tiny
from rl_training.probes import SimpleEntropyProbe


class Moments(NamedTuple):
    """Adam's moments, (P,)."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int


@dataclass
class Snapshot:
    """Everything a step starts from."""

    step: int
    sizes: dict[str, int]  # P of each parameter
    parameters: Tensor
    moments: Moments
    weight_decay: list[float]  # of each parameter
    hyperparameters: dict[str, Any]  # the other ones, shared by all parameters
    max_grad_norm: float
    rollout: Any
    fold: Tensor
    update: Tensor | None = None  # θ_after − θ_before


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


class Recorder(Probe):
    """Copies the state before each step, and the actual change by the step."""

    name = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Snapshot] = []

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        states = [step.optimizer.states[name] for name in step.weights]
        self.steps.append(
            Snapshot(
                step=step.number,
                sizes={name: p.numel() for name, p in step.weights.items()},
                parameters=flat(step.weights.values()),
                moments=Moments(
                    flat(s.exp_avg for s in states), flat(s.exp_avg_sq for s in states), int(states[0].step)
                ),
                weight_decay=[s.weight_decay for s in states],
                hyperparameters={name: getattr(states[0], name) for name in ("lr", "betas", "eps")},
                max_grad_norm=step.optimizer.max_grad_norm,
                rollout=copy.deepcopy(step.batch.rollout),
                fold=step.batch.fold.clone(),
            )
        )
        return Reading(measured={"recorder/step": Estimate(float(step.number))})

    def after_step(self, ctx: Any, reading: Reading) -> Reading:
        step = ctx.step
        self.steps[-1].update = flat(step.weights.values()) - self.steps[-1].parameters
        return reading


class Answers(Kept, SimpleEntropyProbe):
    """The simple probe, which keeps its estimates."""

    def __init__(self, error_decay: float = 0.0, **options: Any) -> None:
        super().__init__(error_decay=error_decay, **options)


class Twin:
    """One step, recomputed with full logits, autograd for one response at a time, and torch's AdamW for each δθ.

    Args:
        weighted: Weight each token by the probability ratio of its prefix, relative to the policy that sampled it.
    """

    def __init__(
        self, step: Snapshot, responses: int, temperature: float = 1.0, max_length: int = L_MAX, weighted: bool = False
    ) -> None:
        self.step, self.max_length, rollout = step, max_length, step.rollout
        self.model = load_tiny()[0].double()
        self.params = dict(self.model.named_parameters())
        assert [(name, p.numel()) for name, p in self.params.items()] == list(step.sizes.items())
        torch.nn.utils.vector_to_parameters(step.parameters, self.params.values())
        self.lengths = rollout.completion_mask.sum(dim=1).tolist()
        scores = [self.score(rollout, i, temperature) for i in range(len(self.lengths))]
        self.logps, self.entropies = ([score[which] for score in scores] for which in (0, 1))
        logs = [self.log_ratios(i) if weighted else [0.0] * int(n) for i, n in enumerate(self.lengths)]
        prefixes = reference.prefix_ratios(logs)
        ragged = [[row.tolist() for row in values] for values in (self.logps, self.entropies)]
        prompts = rollout.prompt_index.tolist()
        self.entropy_of = [dot_product(*rows) for rows in zip(prefixes[0], ragged[1], strict=True)]
        self.lengths = [sum(row) for row in prefixes[0]] if weighted else self.lengths  # tokens, or Σ ρ over them
        self.weights = {
            target: reference.surrogate_weights(ragged[1], prompts, target, ratios=prefixes)
            for target in ("sequence", "length")
        }
        self.folds = [(step.fold == k).nonzero().flatten().tolist() for k in range(int(step.fold.max()) + 1)]
        self.choose(responses)
        self.x, self.gradients, self.d_loss = self.gradients_of_folds()
        self.update = self.adamw(self.mean(self.gradients))
        self.without = self.means_without(self.gradients)
        self.update_without = self.adamw(self.without)

    def choose(self, responses: int) -> None:
        """Set from which responses X is computed, and how many responses each of them represents."""
        prompts = self.step.rollout.prompt_index.tolist()
        self.chosen = [i for i, p in enumerate(prompts) if prompts[:i].count(p) < responses]
        self.multiplicity = dict.fromkeys(self.chosen, prompts.count(prompts[0]) / responses)

    def score(self, rollout: Any, i: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the policy's tokens in one response: unpadded, in its own graph."""
        prompt = rollout.prompt_ids[i][rollout.prompt_mask[i].bool()]
        there = rollout.token_mask[i].bool()
        response, sampled = rollout.completion_ids[i][there], rollout.completion_mask[i][there].bool()
        logits = self.model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        table = (logits / temperature).log_softmax(dim=-1)
        return table.gather(1, response[:, None]).squeeze(1)[sampled], -(table.exp() * table).sum(dim=1)[sampled]

    def log_ratios(self, i: int) -> list[float]:
        """Return log π − log μ of the tokens of a response."""
        at_sampling = self.step.rollout.sampling_logps[i, : len(self.logps[i])].double()
        return (self.logps[i].detach() - at_sampling).tolist()

    def training_loss(self, i: int) -> Tensor:
        """Return the clipped loss of one response, summed over its tokens. Ratios are 1 at the first step on it."""
        advantage, logps = float(self.step.rollout.advantages[i]), self.logps[i]
        kept = self.step.rollout.sampling_logps
        at_sampling = logps.detach() if kept is None else kept[i, : len(logps)].double()
        ratio = (logps - at_sampling).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()

    def gradients_of_folds(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return X and the loss gradient by fold.

        Returns:
            The means of (X_seq, X_len) over each fold, (2, K, P); the means of the loss gradient, (K, P); the loss
            gradient of each response, (B, P).
        """
        x = torch.zeros(2, len(self.folds), len(self.step.parameters), dtype=torch.float64)
        of_loss = torch.stack([self.gradient(self.training_loss(i) / self.max_length) for i in range(len(self.logps))])
        for k, fold in enumerate(self.folds):
            for i in fold:
                if i in self.multiplicity:
                    stands_for = self.multiplicity[i] / len(fold)
                    for target, (w, u) in enumerate(self.weights.values()):
                        w_i, u_i = (torch.tensor(weights[i], dtype=torch.float64) for weights in (w, u))
                        x[target, k] += stands_for * self.gradient(w_i @ self.logps[i] + u_i @ self.entropies[i])
        return x, torch.stack([of_loss[fold].mean(dim=0) for fold in self.folds]), of_loss

    def gradient(self, value: Tensor) -> Tensor:
        return flat(torch.autograd.grad(value, list(self.params.values()), retain_graph=True))

    def mean(self, of_folds: Tensor, which: Iterable[int] | None = None) -> Tensor:
        """Return the mean over the sequences of the folds `which`, by default all, from each fold's mean, (K, P)."""
        kept = list(range(len(self.folds)) if which is None else which)
        sizes = torch.tensor([len(self.folds[k]) for k in kept], dtype=torch.float64)
        return sizes @ of_folds[kept] / sizes.sum()

    def means_without(self, of_folds: Tensor) -> Tensor:
        """Return for each fold the mean over the sequences of all other folds, (K, P)."""
        numbers = range(len(self.folds))
        return torch.stack([self.mean(of_folds, [j for j in numbers if j != k]) for k in numbers])

    def clipped(self, gradients: Tensor, max_grad_norm: float | None = None) -> Tensor:
        norm = gradients.norm(dim=-1, keepdim=True)
        return gradients * ((max_grad_norm or self.step.max_grad_norm) / (norm + 1e-6)).clamp(max=1.0)

    def parts(self, gradients: Tensor) -> dict[str, Tensor]:
        """Return the three terms of the update θ ← θ − lr λ θ − lr (β1 m + (1−β1) g) / (1−β1^t) / (√v̂ + ε)."""
        exp_avg, exp_avg_sq, step = self.step.moments
        lr, (beta1, beta2), eps = self.step.hyperparameters.values()
        v = (beta2 * exp_avg_sq + (1 - beta2) * gradients**2) / (1 - beta2 ** (step + 1))
        scale = -lr / (1 - beta1 ** (step + 1)) / (v.sqrt() + eps)
        decay = -lr * self.expand(self.step.weight_decay) * self.step.parameters
        gradient = scale * (1 - beta1) * gradients
        return {"momentum": scale * beta1 * exp_avg, "gradient": gradient, "decay": decay}

    def adamw(self, gradients: Tensor, max_grad_norm: float | None = None) -> Tensor:
        """Return torch's AdamW update for each of these gradients, (…, P)."""
        moments = self.step.moments
        tables = [t.expand_as(gradients).clone() for t in (self.step.parameters, *moments[:2])]
        tables_and_grad = (*tables, self.clipped(gradients, max_grad_norm))
        views = (table.split(list(self.step.sizes.values()), dim=-1) for table in tables_and_grad)
        optimizer = torch.optim.AdamW([torch.zeros(0)], **self.step.hyperparameters)
        for weight_decay, values, exp_avg, exp_avg_sq, grad in zip(self.step.weight_decay, *views, strict=True):
            param = torch.nn.Parameter(values)  # a view of the table, like its moments: the step changes the table
            param.grad = grad
            optimizer.add_param_group({"params": [param], "weight_decay": weight_decay})
            step = torch.tensor(float(moments.step))
            optimizer.state[param] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        optimizer.step()
        return tables[0] - self.step.parameters

    def expand(self, numbers: Iterable[float]) -> Tensor:
        """Expand one number per parameter tensor to all of its entries, (P,)."""
        sizes = self.step.sizes.values()
        return torch.cat([torch.full((size,), float(x)).double() for x, size in zip(numbers, sizes, strict=True)])

    def named(self, word: str) -> Tensor:
        """Return (P,): 1 in the parameters whose names contain this word, 0 in all others."""
        return self.expand(word in name for name in self.step.sizes)

    @property
    def level(self) -> float:
        """Entropy per token over all folds."""
        return sum(self.entropy_of) / sum(self.lengths)

    def products(self, updates: Tensor) -> Tensor:
        """Return X_seq·δ and X_len·δ of each fold, (2, K), for one δ, (P,), or one per fold, (K, P)."""
        return torch.linalg.vecdot(self.x, updates)

    def rows(self, products: Tensor) -> list[list[float]]:
        """Return [entropy, length, sequences, X_seq·δ, X_len·δ] of each fold, products times the fold's size."""
        return [
            [
                sum(self.entropy_of[i] for i in fold),
                sum(self.lengths[i] for i in fold),
                len(fold),
                *(len(fold) * of_fold).tolist(),
            ]
            for fold, of_fold in zip(self.folds, products.T, strict=True)
        ]

    def change(self, updates: Tensor, statistic: Any) -> float:
        return statistic([sum(column) for column in zip(*self.rows(self.products(updates)), strict=True)])

    def stderr(
        self,
        without: Tensor,
        statistic: Any,
        previous: Tensor | None = None,
        whole: Tensor | None = None,
        leave_out_updates: Tensor | None = None,
    ) -> float:
        """Return the delete-one-fold jackknife error, with δθ_(−k,−l) ≈ δθ_(−k) + δθ_(−l) − δθ.

        Args:
            without: For each fold k the update δθ_(−k) that X_k is multiplied with.
            previous: The update of the previous step. If given, the error is that of ½(forward + backward).
            whole: δθ of a part of the step. None means the whole step.
            leave_out_updates: δθ_(−l) by fold l, for the same part.
        """
        values = []
        base = self.products(without) - self.products(self.update if whole is None else whole)
        for out, update in enumerate(self.update_without if leave_out_updates is None else leave_out_updates):
            products = base + self.products(update)
            if previous is not None:
                products = 0.5 * (products + self.products(previous))
            kept = [row for k, row in enumerate(self.rows(products)) if k != out]
            values.append(statistic([sum(column) for column in zip(*kept, strict=True)]))
        mean = sum(values) / len(values)
        return math.sqrt((len(values) - 1) / len(values) * sum((v - mean) ** 2 for v in values))

    def reward(self) -> tuple[float, float]:
        """Return the change of the mean reward by the leave-one-out updates, and its jackknife error as in `stderr`."""
        rewards, prompts = self.step.rollout.rewards.tolist(), self.step.rollout.prompt_index.tolist()
        above = []
        for i, reward in enumerate(rewards):
            others = [r for j, r in enumerate(rewards) if j != i and prompts[j] == prompts[i]]
            above.append(reward - sum(others) / len(others))
        gradients = torch.stack([x * self.gradient(logps.sum()) for x, logps in zip(above, self.logps, strict=True)])
        sizes = [len(fold) for fold in self.folds]
        by_fold = torch.stack([gradients[fold].sum(dim=0) for fold in self.folds])
        products = torch.linalg.vecdot(by_fold, self.update_without)
        less = [by_fold @ (update - self.update) for update in self.update_without]
        without = [
            sum(float(products[k] + less[out][k]) for k in range(len(sizes)) if k != out) / (sum(sizes) - sizes[out])
            for out in range(len(sizes))
        ]
        mean = sum(without) / len(without)
        spread = sum((value - mean) ** 2 for value in without)
        return float(products.sum()) / sum(sizes), math.sqrt((len(sizes) - 1) / len(sizes) * spread)


def dot_product(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def per_token(sums: list[float], level: float | None = None) -> float:
    entropy, length, _, d_entropy, d_length = sums
    return (d_entropy - (entropy / length if level is None else level) * d_length) / length


def per_sequence(sums: list[float], level: float | None = None) -> float:
    return sums[3] / sums[2]


def per_length(sums: list[float]) -> float:
    return sums[4] / sums[2]

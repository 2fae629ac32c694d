"""The ten tokens of the vocabulary through which a step's own gradient takes most entropy.

A token's part of ΔH is summed over all places where it occurs. Of thousands of tokens, those that look largest are
mostly those with the largest errors. So tokens are chosen by every other measured step, and their numbers come from the
steps between these, whose batches are independent. Sums run over the whole training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.entropy.data import LENGTH, SEQUENCES
from rl_training.statistics.estimate import Estimate, effective_samples
from rl_training.statistics.jackknife import jackknife_stderr
from rl_training.statistics.unavailable import Unavailable

COUNT = 10
NAMES = tuple(f"top_token/{place}/mean_delta_h" for place in range(1, COUNT + 1))
HALF = Unavailable("half_precision", "weights in half precision cannot be shifted by as little as a step")
COLUMNS = 4  # Σ value, Σ variance, Σ variance², occurrences
AROUND = 6  # tokens of an example on each side


@dataclass(frozen=True)
class TokenSums:
    """Sums over measured steps by token of the vocabulary; id −1 is the sum over all tokens.

    >>> sums = TokenSums().add(torch.tensor([-1, 7]), torch.tensor([[2.0, 1.0, 1.0, 5.0], [3.0, 4.0, 16.0, 1.0]]))
    >>> sums = sums.add(torch.tensor([-1, 5]), torch.tensor([[1.0, 1.0, 1.0, 4.0], [1.0, 0.0, 0.0, 4.0]]))
    >>> sums.ids.tolist(), sums.table[:, 0].tolist(), sums.num_steps
    ([-1, 5, 7], [3.0, 1.0, 3.0], 2)
    """

    ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))  # (n,), ascending
    table: Tensor = field(default_factory=lambda: torch.zeros(0, COLUMNS, dtype=torch.float64))
    num_steps: int = 0

    def add(self, ids: Tensor, table: Tensor) -> TokenSums:
        """Return the sums with another step's rows, (n,) and (n, COLUMNS)."""
        merged, index = torch.cat([self.ids, ids]).unique(return_inverse=True)
        sums = torch.zeros(len(merged), COLUMNS, dtype=torch.float64)
        return TokenSums(merged, sums.index_add_(0, index, torch.cat([self.table, table.double()])), self.num_steps + 1)

    def lowest(self, count: int) -> list[int]:
        """Return the tokens with the lowest sums, the lowest first; only those below 0."""
        order = self.table[:, 0].argsort().tolist()
        return [int(self.ids[row]) for row in order if self.ids[row] >= 0 and self.table[row, 0] < 0][:count]

    def mean(self, token: int, num_folds: int) -> tuple[Estimate, float]:
        """Return a token's mean over the steps, and its number of occurrences. A step without the token counts as 0."""
        rows = (self.ids == token).nonzero().flatten().tolist()
        if not rows:
            return Estimate(0.0, 0.0, num_folds), 0.0
        value, variance, squares, occurrences = self.table[rows[0]].tolist()
        batches = variance**2 / squares if squares > 0 else 1.0
        stderr, num_samples = math.sqrt(variance) / self.num_steps, effective_samples(num_folds, batches)
        return Estimate(value / self.num_steps, stderr, num_samples), occurrences


def key(half: int) -> str:
    """Return the name in the probe's state of the sums over every other step."""
    return f"top_tokens_{half}"


def reason_of(ctx: StepContext) -> Unavailable | None:
    """Return the reason why single tokens cannot be measured at this step even though classes can, or None."""
    return HALF if ctx.step.optimizer.rounding_reason else None


def add_step(ctx: StepContext, state: Mapping[str, TokenSums]) -> dict[str, TokenSums]:
    """Return the sums with this step in one half. Collective, valid if `ctx.effects_reason` returns None."""
    halves = [state[key(half)] for half in (0, 1)]
    half = int(halves[0].num_steps > halves[1].num_steps)
    ids, table = _sums_of_step(ctx)
    return {key(half): halves[half].add(ids, table) if bool(table.isfinite().all()) else halves[half]}


def _sums_of_step(ctx: StepContext) -> tuple[Tensor, Tensor]:
    """Return the tokens of this step, −1 first, and their rows, in host memory. Collective."""
    batch, ranks = ctx.step.batch, ctx.ranks
    mask = batch.scores.mask != 0
    ids = batch.rollout.completion_ids[mask]
    top = ids.max() if len(ids) else ids.new_zeros(())
    size = int(ranks.max(top.double())) + 1
    counts = ranks.reduce(torch.bincount(ids, minlength=size).double())
    sums = torch.stack([
        torch.bincount(ids, weights=products[mask], minlength=size)
        for products in ctx.token_products()
    ])  # fmt: skip
    by_token = ranks.reduce(sums).cpu()
    occurring = counts.cpu().nonzero().flatten()
    assert ctx.prediction.totals is not None
    totals = ctx.prediction.totals.cpu()
    effects = torch.cat([by_token.sum(dim=1, keepdim=True), by_token[:, occurring]], dim=1)
    rows = torch.cat([totals[:, [LENGTH]], totals[:, [SEQUENCES]] * effects], dim=1)

    def per_token(sums: Tensor) -> Tensor:
        return sums[..., 1:] / sums[..., :1]

    total = rows.sum(dim=0)
    variance = jackknife_stderr(per_token, total, total - rows).square()
    occurrences = torch.cat([counts.sum().view(1).cpu(), counts.cpu()[occurring]])
    table = torch.stack([per_token(total), variance, variance.square(), occurrences], dim=1)
    return torch.cat([torch.tensor([-1]), occurring]), table


def estimates(ctx: StepContext, state: Mapping[str, TokenSums]) -> dict[str, Estimate]:
    """Return the mean ΔH of the tokens, with text, example and share of the whole in `detail`.

    There are none before the second measured step, and at most as many as lower entropy.
    """
    choosing, measuring = (state[key(half)] for half in (0, 1))
    if not measuring.num_steps:
        return {}
    num_folds, by_name = ctx.step.batch.num_folds, dict[str, Estimate]()
    whole, num_tokens = measuring.mean(-1, num_folds)
    for name, token in zip(NAMES, choosing.lowest(COUNT), strict=False):
        mean, occurrences = measuring.mean(token, num_folds)
        detail: dict[str, str | float] = {
            "text": _text(ctx, token), "example": _example(ctx, token), "measured_steps": measuring.num_steps,
            "share_of_tokens": occurrences / num_tokens, "whole": whole.value, "whole_stderr": whole.stderr,
        }  # fmt: skip
        by_name[name] = Estimate(mean.value, mean.stderr, mean.num_samples, detail=detail)
    return by_name


def _text(ctx: StepContext, token: int) -> str:
    if not ctx.policy.has_text:
        return f"token {token}"
    return ctx.policy.decode(torch.tensor([token])) or f"special token {token}"


def _example(ctx: StepContext, token: int) -> str:
    """Return one occurrence with the tokens around it, the token in brackets; "" if this rank has none."""
    rollout = ctx.step.batch.rollout
    places = ((rollout.completion_ids == token) & (ctx.step.batch.scores.mask != 0)).nonzero()
    if not len(places) or not ctx.policy.has_text:
        return ""
    row, column = places[len(places) // 2].tolist()
    there = rollout.completion_mask[row].bool()
    ids, at = rollout.completion_ids[row][there], int(there[:column].sum())
    before, after = (ctx.policy.decode(part) for part in (ids[max(0, at - AROUND) : at], ids[at + 1 : at + 1 + AROUND]))
    return f"{before}[{_text(ctx, token)}]{after}"

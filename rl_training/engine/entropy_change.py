"""What a step does to entropy to first order: X by fold times the optimizer's step, summed over whole-prompt folds.

    forward      Σ_k n_k X_k · δθ_(−k) / N     leave-fold-out: the step that the other folds alone would have made
    backward     Σ_k n_k X_k · δθ_before / N   the step before, which is independent of this batch
    reuse        Σ_k n_k X_k · δθ / N          biased: X and δθ share their noise

Each fold k contributes a row: its levels Σρ, ΣρH, ΣρT (number of sequences, their entropies and lengths, weighted by
the importance ratio ρ), and n_k X_k · δθ for every update δθ of interest, with X = ∂H_seq − H_tok ∂E[T] = E[T] ∂H_tok
and, if asked for, X = ∂H_seq. Everything reported is one smooth function, `statistic`, of the sums of these rows.
Where the second is asked for, the sums without a fold have the H_tok of the other folds in them. Where it is not, H_tok
is taken as given, and bars per token are some percent too small (docs/explanation/theory.md).

Without fold l the steps of the other folds lose l too, δθ_(−k,−l) − δθ_(−k) ≈ δθ_(−l) − δθ, and with S = Σ_k n_k X_k

    Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ)  =  S · (δθ_(−l) − δθ) − n_l X_l · (δθ_(−l) − δθ).

So only S and one entropy gradient at a time are held in memory: besides the K rows of the folds' gradients, a step
holds δθ, the previous δθ, S and one X; and all X_k only for probes that multiply them with changes of the step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_training.engine.batch import Batch
from rl_training.engine.capabilities import REUSED, why_too_far_off_policy
from rl_training.engine.entropy_gradients import fold_gradients, importance_ratios
from rl_training.engine.fold_products import PRODUCTS, FoldProducts, as_pairs
from rl_training.engine.memory import StepMemory
from rl_training.engine.quantities import Quantity
from rl_training.engine.updates import (
    Piece,
    StepsWithoutFolds,
    clipping,
    optimizer_pieces,
    whole_update,
)
from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR
from rl_training.mathematics.jackknife import jackknife_stderr
from rl_training.mathematics.vectors import Vector, dot

if TYPE_CHECKING:
    from rl_training.engine.step import Step

LEVELS = 3  # columns of a row before the products
FORWARD, BACKWARD, REUSE, UNCLIPPED = range(len(PRODUCTS))


def statistic(sums: Tensor) -> Tensor:
    """Returns (..., 1 + products + 1, 2): the entropy, each product and ½(forward + backward), from sums over folds.

    The last dimension is per token, per sequence. ½(forward + backward) of ONE batch is its share of the cumulative
    trapezoid; the two are not independent, so its error is taken from the sum.
    """
    sequences, entropy, length = sums[..., :LEVELS].unbind(-1)
    number = torch.stack([length, sequences], dim=-1).unsqueeze(-2)  # of tokens, of sequences
    levels = entropy[..., None, None].expand_as(number)
    values = torch.cat([levels, sums[..., LEVELS:].unflatten(-1, (-1, 2))], dim=-2) / number
    half_step = 0.5 * (values[..., 1 + FORWARD, :] + values[..., 1 + BACKWARD, :])
    return torch.cat([values, half_step.unsqueeze(-2)], dim=-2)


@dataclass(frozen=True)
class FoldSums:
    """The sums over all folds of all ranks, and those without each fold of this rank, ready for the jackknife.

    A product is a pair, per token and per sequence; the second is nan unless asked for.
    """

    total: Tensor  # (LEVELS + 2 products,)
    without: Tensor  # (K, LEVELS + 2 products), row l the sums without fold l
    num_folds: int  # of all ranks


def sums_without(total: Tensor, by_fold: Tensor, lost: Tensor, level: float | None) -> Tensor:
    """Returns (K, columns), row l the sums without fold l.

    total    (columns,), over all folds of all ranks
    by_fold  (K, columns), what each fold of this rank adds
    lost     (K, 2), Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ)
    level    the H_tok in X, which row l replaces by that of the other folds; None: it is taken as given
    """
    without = total - by_fold
    pairs = without[:, LEVELS:].unflatten(1, (-1, 2))
    pairs[:, [FORWARD, UNCLIPPED]] += lost.unsqueeze(1)
    if level is not None:  # ∂E[T] is what ∂H_seq and ∂H_seq − H_tok ∂E[T] differ by, over H_tok
        token, sequence = pairs.unbind(-1)
        token += (1.0 - without[:, 1:2] / without[:, 2:3] / level) * (sequence - token)
    return without


def levels_of_folds(batch: Batch, ratios: Tensor) -> Tensor:
    """Returns (K, LEVELS): Σρ, ΣρH and ΣρT of each fold of this rank."""
    mask = batch.scores.mask.double()
    entropies = batch.scores.entropies.double().masked_fill(mask == 0, 0.0)
    of_sequence = torch.stack([torch.ones_like(ratios), entropies.sum(dim=1), mask.sum(dim=1)], dim=1)
    return batch.sum_by_fold(ratios.unsqueeze(1) * of_sequence)


class EntropyChange:
    """The first-order change of entropy of one step; each part is calculated when it is first asked for.

    `why_none`, `sums` and `update` are collectives on first access: all ranks must access them.
    """

    def __init__(self, step: Step, memory: StepMemory) -> None:
        self.number, self.settings = step.number, memory.settings
        self.attribution, self.layout = memory.attribution, memory.layout
        self._batch, self._gradients, self._optimizer = step.batch, step.gradients, step.optimizer
        self._policy, self._ranks, self._capabilities = step.policy, step.ranks, step.capabilities
        self._memory = memory
        self.sizes = torch.bincount(step.batch.fold).double()  # (K,), n_k

    # --- whether there is one ---------------------------------------------------------------------------------------

    @cached_property
    def ratios(self) -> Tensor | None:
        """ρ, (B,) fp64; None off-policy without log-probabilities of the sampling."""
        return importance_ratios(self._batch)

    @cached_property
    def why_none(self) -> str:
        """Why the step has no entropy gradient, "" if it has one."""
        reason = self._capabilities.why_no_entropy_gradient(self.ratios)
        if reason or self.ratios is None:
            return reason
        return why_too_far_off_policy(self.ratios, self._batch, self._ranks.reduce)

    @cached_property
    def why_no_forward(self) -> str:
        """Why no fold can be left out of the step, "" if one can."""
        return self._capabilities.why_no_forward()

    @cached_property
    def why_no_backward(self) -> str:
        """Why the step before cannot be multiplied with X, "" if it can."""
        return self._memory.history.why_none(self.number) or (REUSED if self._capabilities.reused else "")

    # --- the step ---------------------------------------------------------------------------------------------------

    @cached_property
    def gradient(self) -> Vector:
        """g, the mean gradient of the step, not clipped."""
        return self.layout.vector(self._gradients.mean.values())

    @cached_property
    def pieces(self) -> list[Piece]:
        """The optimizer's pieces; none where its step has no formula."""
        return optimizer_pieces(self.layout, self._gradients.parameters, self._optimizer.states)

    @cached_property
    def clip(self) -> float:
        """The factor by which the step's gradient is clipped."""
        return float(clipping(dot(self.gradient, self.gradient), self._optimizer.max_grad_norm))

    @cached_property
    def update(self) -> Vector | None:
        """δθ of the step; None where it has no formula."""
        return whole_update(self.layout, self.pieces, self.gradient, self.clip) if self.pieces else None

    # --- the sums over folds ----------------------------------------------------------------------------------------

    @cached_property
    def sums(self) -> FoldSums:
        """The sums over folds of everything that is reported. Only where `why_none` is ""."""
        batch, reduce, settings = self._batch, self._ranks.reduce, self.settings
        assert self.ratios is not None
        sizes, levels = self.sizes, levels_of_folds(batch, self.ratios)
        of_fold = torch.cat([torch.ones_like(sizes).unsqueeze(1), sizes.unsqueeze(1), levels], dim=1)
        num_folds, total_size, _, entropy, length = reduce(of_fold.sum(dim=0)).tolist()
        products = self._products(total_size)
        parameters = list(self._gradients.parameters.values())
        gradients = fold_gradients(
            batch, self._policy, parameters, self.layout, self.ratios, entropy / length, settings
        )
        by_fold = torch.stack([
            torch.cat([levels[k], sizes[k] * as_pairs(products.add(k, fold)).flatten()])
            for k, fold in enumerate(gradients)
        ])  # fmt: skip
        total = reduce(by_fold.sum(dim=0))
        level = entropy / length if settings.per_sequence and entropy > 0 else None  # without any entropy none to vary
        without = sums_without(total, by_fold, as_pairs(products.lost_with_a_fold()), level)
        return FoldSums(total, without, int(num_folds))

    @cached_property
    def stderrs(self) -> Tensor:
        """The jackknife errors of `statistic(sums.total)`, of this batch alone; nan with too few folds."""
        stderrs = jackknife_stderr(statistic, self.sums.total, self.sums.without, self._ranks.reduce).cpu()
        return stderrs if self.sums.num_folds >= MIN_FOLDS_FOR_STDERR else torch.full_like(stderrs, torch.nan)

    @cached_property
    def quantities(self) -> dict[str, Quantity]:
        """The entropy, each product and each split of forward, by name: nan with a reason where not available.

        Variances of products are averaged over a few steps, because one batch can miss rare responses and look too
        certain.
        """
        reasons = {"entropy": "", "backward": self.why_no_backward, "reuse": self._optimizer.reason}
        values = statistic(self.sums.total).cpu()
        names = ("entropy", *PRODUCTS, *self.attribution.labels)
        rows = [
            Quantity(name, value, stderr, self.number).unless(reasons.get(name, self.why_no_forward))
            for name, value, stderr in zip(names, values, self.stderrs, strict=False)
        ]
        raw = torch.stack([row.stderr for row in rows[1:]])
        variances, batches = self._memory.errors.add(raw.square())
        averaged = [
            dataclasses.replace(row, stderr=stderr, batches=of, stderr_of_batch=row.stderr)
            for row, stderr, of in zip(rows[1:], variances.sqrt(), batches, strict=True)
        ]
        by_name = {row.name: row for row in (rows[0], *averaged)}
        by_name["backward"] = dataclasses.replace(by_name["backward"], about_step=self.number - 1)
        return by_name

    @property
    def rows(self) -> Vector:
        """E[T] ∂H_tok of each fold of this rank, (K, n) of each bucket; where a probe needs Need.ENTROPY_ROWS."""
        assert self.sums is not None
        assert self._rows is not None
        return self._rows

    def gradient_of(self, folds: slice) -> Vector:
        """Returns ∂H_tok of some folds of this rank, from `rows`; zeros where there are none."""
        sequences, _, length = self.sums.total[:LEVELS].tolist()
        sizes = self.sizes[folds]
        shares = sizes * (sequences / length / max(float(sizes.sum()), 1.0))
        return [(shares.to(part) @ part[folds]).to(self.layout.device) for part in self.rows]

    @property
    def steps_without(self) -> StepsWithoutFolds:
        """The steps without each fold of this rank; only where `why_no_forward` is ""."""
        assert self.sums is not None
        assert self._steps is not None
        return self._steps

    def _products(self, total_size: float) -> FoldProducts:
        settings, rows = self.settings, self._gradients.rows
        self._steps, self._rows = None, None
        if self.pieces and rows is not None and float(self.sizes.max()) < total_size:
            norm = self._optimizer.max_grad_norm
            self._steps = StepsWithoutFolds(self.pieces, self.gradient, rows, self.sizes, total_size, norm)
        if self._memory.keep_rows:
            self._rows = self.layout.zeros(self._batch.num_folds, device=self._memory.device)
        return FoldProducts(
            layout=self.layout,
            sizes=self.sizes,
            attribution=self.attribution,
            update=self.update,
            previous=self._memory.history.before(self.number),
            steps=self._steps,
            num_targets=1 + settings.per_sequence,
            rows=self._rows,
        )

    # --- what outlives the step -------------------------------------------------------------------------------------

    def keep_update(self) -> None:
        """Keeps δθ for the step after it. Called once, before the optimizer's step."""
        parameters = self.layout.vector(p.detach() for p in self._gradients.parameters.values())
        self._memory.history.keep(self.number, self.update, parameters)

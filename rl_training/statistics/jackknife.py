"""The delete-one jackknife of a smooth function of sums.

Everything reported is a smooth function f of sums over folds, s = Σ_k s_k, so one jackknife serves all. With s_(−l),
the sums without fold l,

    se² = (K−1)/K Σ_l (f(s_(−l)) − mean_l f(s_(−l)))²         K folds.

`Replicates` keeps the f(s_(−l)), so that numbers computed from several Replicates have the right error: if two share
their noise, it cancels in their difference.

`JackknifeUnits` says what is left out at a time. Units are independent: sequences if each answers a different prompt,
prompts with all their responses, or blocks of prompts on one rank. Ranks exchange sums of tables, never the sequences
themselves.

Which one to use: `jackknife_stderr` for the error of a number from its sums, `estimates_over_units` for several numbers
that are functions of sums over prompts, `JackknifeUnits` and `Replicates` if the replicates are needed later.

Source: Efron & Stein 1981, "The jackknife estimate of variance".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.statistics.estimate import Estimate
from rl_training.statistics.unavailable import Unavailable

MIN_UNITS_OFFLINE = 8  # with fewer units, a jackknife error is too noisy to report
MIN_FOLDS_STEP = 4  # folds or prompts of a step; they give the error to about 40 %, which Student's t accounts for
FEW_FOLDS = Unavailable("few_folds", "no error bar: it needs {least} folds of whole prompts, the step has {count}")
FEW_PROMPTS = Unavailable("few_prompts", "no error bar: it needs {least} prompts, the step has {count}")
NOT_FINITE = Unavailable(
    "not_finite", "a log-probability, an entropy or an advantage of the step is not a finite number"
)
NONE_WITHOUT = Unavailable(
    "none_without_a_unit", "no error bar: without one of its prompts or folds it is not a number"
)


def stderr_reason(num_units: int, few: Unavailable = FEW_FOLDS) -> Unavailable | None:
    """Return the reason why a step has no error bar: too few folds, or other independent units. None if it has one."""
    return None if num_units >= MIN_FOLDS_STEP else few.formatted(least=MIN_FOLDS_STEP, count=num_units)


def jackknife_stderr(
    statistic: Callable[[Tensor], Tensor],
    sums: Tensor,
    sums_without: Tensor,
) -> Tensor:
    """Return the delete-one-fold jackknife standard error of statistic(sums), shaped like it.

    The arguments are those of `jackknife_covariance`. The mean of x_1..x_K has the statistic s ↦ s[0]/s[1] with
    s = (Σx, K), and se = sd(x)/√K:

    >>> x = torch.tensor([1.0, 3.0, 5.0, 7.0], dtype=torch.float64)
    >>> rows = torch.stack([x, torch.ones(4)], dim=1)
    >>> sums = rows.sum(dim=0)
    >>> error = jackknife_stderr(lambda s: s[..., 0] / s[..., 1], sums, sums - rows)
    >>> torch.isclose(error, x.std() / 2)
    tensor(True)
    """
    return Replicates(statistic(sums), statistic(sums_without)).stderr


def jackknife_covariance(
    statistic: Callable[[Tensor], Tensor],
    sums: Tensor,
    sums_without: Tensor,
) -> Tensor:
    """Return the delete-one-fold jackknife covariance of statistic(sums).

    Args:
        statistic: Maps (..., m) sums to (..., p) values.
        sums: The sums over all folds, (m,).
        sums_without: The sums without each fold, (K, m): row l is without fold l.

    Returns:
        The covariance of the statistic's last dimension, (..., p, p).

    The covariance of the sums of x and of y = −2x over three pairs:

    >>> rows = torch.tensor([[1.0, -2.0], [2.0, -4.0], [6.0, -12.0]], dtype=torch.float64)
    >>> sums = rows.sum(dim=0)
    >>> jackknife_covariance(lambda s: s, sums, sums - rows)
    tensor([[  9.3333, -18.6667],
            [-18.6667,  37.3333]], dtype=torch.float64)
    """
    deviations = statistic(sums_without) - statistic(sums)  # centred, so that the square does not cancel
    count = len(sums_without)
    means = deviations.mean(dim=0)
    products = (deviations.unsqueeze(-1) * deviations.unsqueeze(-2)).mean(dim=0)
    return (count - 1) * (products - means.unsqueeze(-1) * means.unsqueeze(-2))


def leave_out_coefficients(fold_sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return a_k = N / (N − n_k) and b_k = −n_k / (N − n_k), (K,) each: the mean without fold k is a_k g + b_k g_k.

    Args:
        fold_sizes: (K,), n_k; N is their sum.

    Raises:
        ValueError: One fold holds everything.

    >>> leave_out_coefficients(torch.tensor([1.0, 3.0]))
    (tensor([1.3333, 4.0000]), tensor([-0.3333, -3.0000]))
    """
    total = fold_sizes.sum()
    others = total - fold_sizes
    if float(others.min()) <= 0.0:
        raise ValueError("a fold holds the whole batch: nothing is left when it is left out")
    return total / others, -fold_sizes / others


def identity(tensor: Tensor) -> Tensor:
    """Return the tensor itself: the sum over ranks if there is only one."""
    return tensor


def estimates_over_units(
    names: Sequence[str],
    statistic: Callable[[Tensor], Tensor],
    by_unit: Tensor,
    reduce: Callable[[Tensor], Tensor] = identity,
    no_bar: str | None = None,
    few: Unavailable = FEW_PROMPTS,
) -> dict[str, Estimate]:
    """Return the numbers of statistic(Σ by_unit) by name, with jackknife errors if there are enough units.

    Args:
        names: The names of the numbers in the statistic's last dimension.
        statistic: Maps (..., m) sums to (..., p) values.
        by_unit: What each independent unit, such as a fold or a prompt with all its responses, adds. (units, m).
        reduce: Sums a tensor over ranks, if each rank holds other units. The call is then collective.
        no_bar: The reason to give no error if the units are not independent; None if they are.
        few: The reason if there are too few units. Its text names the kind of unit.
    """
    total = reduce(by_unit.sum(dim=0))
    value = statistic(total)
    deviations = statistic(total - by_unit) - value  # centred, so that the square does not cancel
    table = reduce(torch.stack([torch.ones_like(deviations), deviations, deviations.square()]).sum(dim=1))
    num_units = int(table[0, 0])
    means, squares = table[1:] / table[0]
    stderrs = ((num_units - 1) * (squares - means * means)).clamp(min=0).sqrt()
    no_bar = no_bar or stderr_reason(num_units, few)
    return {
        name: _estimate(number, stderr, num_units, no_bar)
        for name, number, stderr in zip(names, value.tolist(), stderrs.tolist(), strict=True)
    }


def _estimate(value: float, stderr: float, num_units: int, no_bar: str | None) -> Estimate:
    """Return a number with its error, or without one for the reason `no_bar`; missing if it is not finite."""
    if not math.isfinite(value):
        return Estimate.missing(NOT_FINITE)
    if no_bar or math.isnan(stderr):
        return Estimate(value, math.nan, num_units, no_bar or NONE_WITHOUT)
    return Estimate(value, stderr, num_units)


@dataclass(frozen=True)
class Replicates:
    """Numbers from N independent units, and their values without each of the units.

    Replicates of the same units, in the same order, can be added, subtracted and multiplied by a number. Example: the
    mean of x is Replicates(x.mean(0), (x.sum(0) - x) / (N - 1)), and its `stderr` is sd(x)/√N.
    """

    value: Tensor  # (...), from all units
    without: Tensor  # (N, ...); row i is calculated without unit i

    @property
    def stderr(self) -> Tensor:
        """The delete-one jackknife standard error, shaped like `value`."""
        count = len(self.without)
        return ((count - 1) / count * (self.without - self.without.mean(dim=0)).square().sum(dim=0)).sqrt()

    def __add__(self, other: Replicates) -> Replicates:
        return Replicates(self.value + other.value, self.without + other.without)

    def __sub__(self, other: Replicates) -> Replicates:
        return Replicates(self.value - other.value, self.without - other.without)

    def __mul__(self, factor: float) -> Replicates:
        return Replicates(factor * self.value, factor * self.without)


@dataclass(frozen=True)
class JackknifeUnits:
    """The jackknife unit of each of this rank's rows. Methods that call `reduce` are collective."""

    number: Tensor  # (B,), the unit of each row, 0 … count − 1 over all ranks; no unit lies on two ranks
    count: int  # number of units over all ranks
    reduce: Callable[[Tensor], Tensor] = identity  # sums a tensor over ranks

    @classmethod
    def of_rows(cls, rows: Tensor) -> JackknifeUnits:
        """Make each row of a table a separate unit. No other rank holds units."""
        return cls(torch.arange(len(rows), device=rows.device), len(rows))

    def in_blocks(self, size: int) -> JackknifeUnits:
        """Join each `size` consecutive units of a rank into one; the last of a rank may be smaller. Collective."""
        numbers, place = self.number.unique(return_inverse=True)
        is_first = torch.zeros(self.count, dtype=torch.float64, device=numbers.device)
        is_first[numbers[::size]] = 1.0
        is_first = self.reduce(is_first)
        first = numbers[::size].repeat_interleave(size)[: len(numbers)]
        return JackknifeUnits((is_first.long().cumsum(dim=0)[first] - 1)[place], int(is_first.sum()), self.reduce)

    def gather(self, values: Tensor) -> Tensor:
        """Return the sums of (B, …) values over each unit's rows: all units, (count, …), on every rank. Collective."""
        table = values.new_zeros(self.count, *values.shape[1:])
        return self.reduce(table.index_add_(0, self.number, values))

    def max(self, values: Tensor) -> Tensor:
        """Return the maximum of (B, …) values over the rows of all ranks, (…). Collective."""
        first = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        first[self.number.min()] = 1.0  # a rank is identified by its first unit
        first = self.reduce(first)
        table = values.new_zeros(int(first.sum()), *values.shape[1:])
        table[int(first[: int(self.number.min())].sum())] = values.amax(dim=0)
        return self.reduce(table).amax(dim=0)

    def local(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's unit numbers, (u,), and the sums of (B, …) values over each unit's rows, (u, …)."""
        numbers, place = self.number.unique(return_inverse=True)
        return numbers, values.new_zeros(len(numbers), *values.shape[1:]).index_add_(0, place, values)

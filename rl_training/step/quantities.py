"""The δH quantities of a step: per token and per sequence, with errors, the reason if missing, and their step."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_training.statistics.estimate import FEW_FOLDS, NOT_FINITE_GRADIENT, Estimate, stderr_reason
from rl_training.statistics.unavailable import Unavailable

# What the entropy gradient is multiplied with, in the order of the products. The splits of `forward` follow.
PRODUCTS = ("forward", "backward", "reuse", "forward_unclipped")
LENGTH_AND_REWARD = "length_and_reward"  # the name of this quantity's pair of numbers
NO_STDERR = {"reuse": Unavailable("biased", "no error bar: the same-batch product is biased")}


@dataclass(frozen=True)
class Quantity:
    """A quantity per token and per sequence."""

    name: str
    value: Tensor  # (2,)
    stderr: Tensor  # (2,)
    about_step: int  # the step to which it refers
    reason: str = ""  # an Unavailable: why it is missing, if it is
    # (2,): number of batches of equal variance behind the error (Satterthwaite)
    batches: Tensor = field(default_factory=lambda: torch.ones(2))
    stderr_of_batch: Tensor | None = None  # (2,): the error from this batch alone
    remark: str = ""  # on an available value or error bar, or why only the bar is missing

    def masked_if(self, reason: str | None) -> Quantity:
        """Return this quantity, as nan with the reason if there is one."""
        if not reason:
            return self
        unknown = torch.full((2,), torch.nan)
        return dataclasses.replace(self, value=unknown, stderr=unknown, reason=reason)

    def estimates(self, num_folds: int, few: Unavailable | None = None) -> list[Estimate]:
        """Return both numbers as estimates. Error bars require enough folds; `few` may say why there are too few."""
        no_stderr = NO_STDERR.get(self.name.split("/")[0]) or stderr_reason(num_folds, few or FEW_FOLDS)
        estimates = []
        for unit, (value, stderr) in enumerate(zip(self.value.tolist(), self.stderr.tolist(), strict=True)):
            missing = (self.reason or NOT_FINITE_GRADIENT) if math.isnan(value) else ""
            error = math.nan if missing or self.name.split("/")[0] in NO_STDERR else stderr
            # Student's t then has (num_folds − 1) · batches degrees of freedom.
            num_samples = (
                num_folds if math.isnan(error) else 1 + int((num_folds - 1) * float(self.batches[unit]) + 1e-9)
            )
            detail: dict[str, str | float] = {}
            if not math.isnan(error) and self.stderr_of_batch is not None:
                detail["stderr_of_batch"] = float(self.stderr_of_batch[unit])
            estimates.append(
                Estimate(value, error, num_samples, missing or no_stderr or self.remark, self.about_step, detail)
            )
        return estimates

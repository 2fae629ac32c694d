"""What a step would have done without some of its sequences, from the rows of a finished kernel: no new backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rl_training.engine.updates import CAUSES
from rl_training.offline.structure import Row, Structure, log_probability_moves

GRADIENT = CAUSES.index("gradient")
Chooser = Callable[[Structure], Tensor]


def chooser(text: str) -> Chooser:
    """Returns what picks the sequences of U that `text` names, (N_U,) bool.

    wrong | right | longest:K | lowest:K (those that lower entropy most) | prompt:HASH. Raises ValueError for another.
    """
    kind, _, value = text.partition(":")
    if kind in ("wrong", "right") and not value:
        return lambda s: s.right(s.update) == (kind == "right")
    if kind == "longest" and value.isdigit():
        return lambda s: _largest(torch.tensor([float(row["tokens"]) for row in s.update]), int(value))
    if kind == "lowest" and value.isdigit():
        return lambda s: _largest(-s.contributions.sum(dim=0), int(value))
    if kind == "prompt" and value:
        return lambda s: torch.tensor([row["prompt_hash"].startswith(value) for row in s.update])
    raise ValueError(f"{text!r} names no sequences: use wrong, right, longest:K, lowest:K or prompt:HASH")


def _largest(values: Tensor, count: int) -> Tensor:
    chosen = torch.zeros(len(values), dtype=torch.bool)
    chosen[values.topk(min(count, len(values))).indices] = True
    return chosen


def what_if(s: Structure, without: Tensor) -> Row:
    """Returns what the step would do to entropy and to right answers in E, had these sequences of U taught nothing.

    log_probability_of_right         mean W·δθ, to first order
    …_before, …_before_measured      of the real step, and what it really changes. Their difference is its second order
                                     (on all of E about −½ of the mean square of W·δθ, a Kullback–Leibler divergence);
                                     what is left of the step has much the same

    Entropy is nan where E's texts are of another checkpoint.

    without  (N_U,) bool. Their advantages count as 0, all others, N_U and the metric M stay, as does the clipping,
             though both follow from the gradient: exact for SGD without clipping
    """
    kept = (~without).double()
    by_cause = s.kernel.tensors["products"]
    others = by_cause.sum(dim=1) - by_cause[:, GRADIENT]
    moves = log_probability_moves(s)
    right = s.right(s.evaluation)
    measured = torch.tensor([row["logp_change"] for row in s.evaluation], dtype=torch.float64)
    parts = {cause: float(s.kernel.about[f"delta_h/part/{cause}"]) for cause in CAUSES}
    gradient = float((s.contributions * kept).sum()) if s.on_policy else math.nan
    return {
        "left_out": int(without.sum()),
        "deltaH1": sum(parts.values()) - parts["gradient"] + gradient,
        "deltaH1_before": sum(parts.values()) if s.on_policy else math.nan,
        "deltaH1/part/gradient": gradient,
        "log_probability_of_right": _mean((others + (moves * kept).sum(dim=1))[right]),
        "log_probability_of_right_before": _mean(by_cause.sum(dim=1)[right]),
        "log_probability_of_right_before_measured": _mean(measured[right]),
    }


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else math.nan

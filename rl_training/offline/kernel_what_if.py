"""What a step would have done without some of its sequences, from the rows of a finished kernel: no new backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rl_training.engine.updates import CAUSES
from rl_training.mathematics.adamw import clip_coefficient
from rl_training.offline.structure import Row, Structure

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
    """Returns what the step would do to entropy and to right answers in E if these sequences of U had zero advantage.

    log_probability_of_right         mean W·δθ, to first order
    …_before, …_before_measured      of the real step, predicted and measured. Their difference is its second order
                                     (on all of E about −½ of the mean square of W·δθ, a Kullback–Leibler divergence),
                                     which is much the same for the remaining step

    Entropy is nan where E's texts are of another checkpoint.

    without  (N_U,) bool. Their advantages count as 0; all others and N_U stay. The remaining gradient is clipped by its
             own norm, from sketches (1 %); Adam's P is kept fixed, though it depends on the gradient too

    Raises ValueError for a kernel without these norms.
    """
    clip_before, clip = float(s.kernel.about["clip_coefficient"]), clip_of_kept(s, (~without).double())
    kept = (~without).double() * (clip / clip_before)
    by_cause = s.kernel.tensors["products"]
    others = by_cause.sum(dim=1) - by_cause[:, GRADIENT]
    right = s.right(s.evaluation)
    measured = torch.tensor([row["logp_change"] for row in s.evaluation], dtype=torch.float64)
    parts = {cause: float(s.kernel.about[f"delta_h/part/{cause}"]) for cause in CAUSES}
    gradient = float((s.contributions * kept).sum()) if s.on_policy else math.nan
    return {
        "left_out": int(without.sum()),
        "clip_coefficient": clip,
        "clip_coefficient_before": clip_before,
        "deltaH1": sum(parts.values()) - parts["gradient"] + gradient,
        "deltaH1_before": sum(parts.values()) if s.on_policy else math.nan,
        "deltaH1/part/gradient": gradient,
        "log_probability_of_right": float((others + (s.log_probability_moves * kept).sum(dim=1))[right].mean()),
        "log_probability_of_right_before": float(by_cause.sum(dim=1)[right].mean()),
        "log_probability_of_right_before_measured": float(measured[right].mean()),
    }


def clip_of_kept(s: Structure, kept: Tensor) -> float:
    """Returns the clip coefficient of −Σ kept_j A_j W_j /(N_U L). |Σ_j A_j W_j| is known exactly, and sketches say what
    share of it the kept ones have.

    kept  (N_U,), 1 or 0
    """
    gram, about = s.kernel.tensors.get("update_gram"), s.kernel.about
    if gram is None:
        raise ValueError(
            f"the kernel of {about['checkpoint']} was calculated before norms of gradients were kept: remove its "
            "folder, and run rl-training analyze kernel.enabled=true again"
        )
    of_kept, of_all = (float(a @ gram @ a) for a in (kept * s.advantages, s.advantages))
    share = math.sqrt(of_kept / of_all) if of_all else 0.0
    norm = torch.tensor(share * float(about["gradient_norm"]), dtype=torch.float64)
    return float(clip_coefficient(norm, float(about["max_grad_norm"])))

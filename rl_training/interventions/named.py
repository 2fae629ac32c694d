"""Every intervention by name: its source, its strength, what it needs, and when it has no effect.

bonus        with its usual strength          bonus:0.02    with another
my.py:softer your own: a function of (LossInputs, strength) in a file that returns Remedied
my.loss:softer            or in a module that can be imported
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rl_training.interventions import remedies
from rl_training.interventions.loss import Function, LossInputs, Remedied

RATIOS_ARE_ONE = "on-policy every ratio is 1, so it changes nothing"
ENTROPY_TERMS = {"entropy_coef", "use_adaptive_entropy"}  # they do not change the weights of log-probabilities
GROWS = "grows with the distance from the reference: one step shows little of it"
# What an intervention may need, and what is said where it is not there.
NEEDS: Mapping[str, tuple[Callable[[LossInputs], bool], str]] = {
    "dr_grpo": (
        lambda loss: loss.settings is not None and loss.settings.differs <= ENTROPY_TERMS,
        "the loss is not Dr-GRPO's, the only one whose weights it changes: set loss_type='dr_grpo', "
        "scale_rewards='none', beta=0, and train with no other intervention on these weights",
    ),
    "advantages": (
        lambda loss: loss.settings is not None and "beta" not in loss.settings.differs,
        "the loss weighs log-probabilities by more than advantages (beta=0 removes a KL term), or is not known",
    ),
    "unit": (
        lambda loss: loss.settings is not None and "loss_type" not in loss.settings.differs,
        "the loss is not divided by Dr-GRPO's constant: set loss_type='dr_grpo'",
    ),
    "rewards": (lambda loss: loss.rewards is not None, "the rewards of these responses are not known"),
    "truncated": (lambda loss: loss.truncated is not None, "which responses are truncated is not known here"),
    "reference": (
        lambda loss: loss.reference_logps is not None,
        "it needs the log-probabilities of a reference model, and there is none: full fine-tuning keeps one only with "
        "beta above 0; with an adapter it is the base model",
    ),
    "some_advantage": (
        lambda loss: loss.silent_share < 1.0,
        "all responses to each prompt have the same reward: there is no gradient to scale",
    ),
}


@dataclass(frozen=True)
class Remedy:
    """The facts about an intervention.

    strength   the usual one; None where it has none        low, high  what it must lie between
    nothing    the strength at which it has no effect; None where there is none
    is_linear  the loss's weights are a straight line in the strength
    remark     a caveat on its one-step effect
    trl        the setting of trl.GRPOConfig that does the same, where there is one
    """

    function: Function
    source: str
    formula: str
    needs: tuple[str, ...] = ("advantages",)
    strength: float | None = None
    low: float = 0.0
    high: float = math.inf
    nothing: float | None = None
    is_linear: bool = False
    nothing_on_policy: bool = False
    remark: str = ""
    trl: str = ""


REMEDIES: Mapping[str, Remedy] = {
    "bonus": Remedy(
        remedies.bonus, "Mnih et al. 2016, arXiv 1602.01783; TRL", "loss − β · mean entropy of the tokens",
        needs=(), strength=0.01, nothing=0.0, is_linear=True, trl="entropy_coef",
    ),
    "psr": Remedy(remedies.psr, "Zhu et al. 2025, arXiv 2506.01347", "A where A > 0, else 0"),
    "nsr": Remedy(remedies.nsr, "Zhu et al. 2025, arXiv 2506.01347", "A where A < 0, else 0"),
    "w_reinforce": Remedy(
        remedies.w_reinforce, "Zhu et al. 2025, arXiv 2506.01347", "λ A where A > 0, else A",
        strength=0.1, high=1.0, nothing=1.0, is_linear=True,
    ),
    "std_norm": Remedy(
        remedies.std_norm, "Shao et al. 2024, arXiv 2402.03300", "A / (sd of the group's rewards + 1e-4)",
        needs=("dr_grpo", "rewards"), trl="scale_rewards='group'",
    ),
    "length_norm": Remedy(
        remedies.length_norm, "Shao et al. 2024, arXiv 2402.03300", "mean over a response's tokens, not sum / L",
        needs=("dr_grpo",), trl="loss_type='grpo'",
    ),
    "dynamic_sampling": Remedy(
        remedies.dynamic_sampling, "Yu et al. 2025 (DAPO), arXiv 2503.14476", "A / (1 − share of prompts without A)",
        needs=("advantages", "some_advantage"),
    ),
    "drop_truncated": Remedy(
        remedies.drop_truncated, "Yu et al. 2025 (DAPO), arXiv 2503.14476", "A = 0 where the response is truncated",
        needs=("advantages", "truncated"), trl="mask_truncated_completions=True",
    ),
    "keep_truncated": Remedy(
        remedies.keep_truncated, "Liu et al. 2025 (Dr-GRPO), arXiv 2503.20783", "A of truncated responses as of others",
        needs=("dr_grpo", "truncated", "rewards"), trl="mask_truncated_completions=False",
    ),
    "clip_cov": Remedy(
        remedies.clip_cov, "Cui et al. 2025, arXiv 2505.22617", "A = 0 on this share of tokens, by covariance",
        strength=0.002, high=1.0,
    ),
    "kl_cov": Remedy(
        remedies.kl_cov, "Cui et al. 2025, arXiv 2505.22617", "loss + |log ρ| on this share of tokens, by covariance",
        needs=("unit",), strength=0.002, high=1.0, nothing_on_policy=True,
    ),
    "top_entropy": Remedy(
        remedies.top_entropy, "Wang et al. 2025, arXiv 2506.01939", "A = 0 but on this share of tokens, by entropy",
        strength=0.2, high=1.0, trl="top_entropy_quantile",
    ),
    "steer": Remedy(
        remedies.steer, "Hao et al. 2025, arXiv 2510.10150 and its code", "A exp(−k |Ω|), Ω = A (1 − π)(log π + h)",
        strength=0.8, high=1.0,
    ),
    "kl": Remedy(
        remedies.kl, "Liu et al. 2025, arXiv 2512.02556; TRL", "loss + β ρ (π_ref/π − log(π_ref/π) − 1)",
        needs=("unit", "reference"), strength=0.04, nothing=0.0, is_linear=True, remark=GROWS, trl="beta",
    ),
    "clip_higher": Remedy(
        remedies.clip_higher, "Yu et al. 2025 (DAPO), arXiv 2503.14476", "ratios clipped above at 1 + ε",
        needs=("dr_grpo",), strength=0.28, nothing_on_policy=True, trl="epsilon_high",
    ),
    "lr": Remedy(
        remedies.lr, "the optimizer's own", "every learning rate × this",
        needs=(), strength=0.5, nothing=1.0, is_linear=True, trl="learning_rate",
    ),
    "max_grad_norm": Remedy(
        remedies.max_grad_norm, "Pascanu et al. 2013, arXiv 1211.5063", "g clipped at this norm",
        needs=(), strength=0.1, trl="max_grad_norm",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Intervention:
    """An intervention with its strength."""

    name: str  # of its metrics
    remedy: Remedy
    strength: float = field(default=math.nan)

    def why_none(self, loss: LossInputs) -> str:
        """Returns why it is not available with this loss, "" if it is."""
        return next((why for there, why in map(NEEDS.__getitem__, self.remedy.needs) if not there(loss)), "")

    def __call__(self, loss: LossInputs) -> Remedied:
        """Returns what a step on this loss would be made with. ValueError where it returns what cannot be weights."""
        remedied = self.remedy.function(loss, self.strength)
        weights = remedied.weights
        if weights is not None:
            for part in (weights.logps, *([] if weights.entropies is None else [weights.entropies])):
                if part.shape != loss.weights.logps.shape or not torch.isfinite(part).all():
                    raise ValueError(
                        f"{self.name} returned weights of shape {tuple(part.shape)} or not finite: return finite ones "
                        f"of shape {tuple(loss.weights.logps.shape)}"
                    )
        return remedied


def intervention(text: str) -> Intervention:
    """Returns the intervention of a name, or of name:strength, or of file.py:function[:strength], module:function.

    ValueError for a name that is not known, and for a strength that means nothing.

    >>> intervention("bonus").strength, intervention("lr:2").strength
    (0.01, 2.0)
    """
    name, _, rest = text.partition(":")
    if "." in name:
        function, _, strength = rest.partition(":")
        remedy = Remedy(_own(name, function), name, "one's own", needs=(), strength=1.0, low=-math.inf)
        name = function
    elif name in REMEDIES:
        remedy, strength = REMEDIES[name], rest
    else:
        close = difflib.get_close_matches(name, REMEDIES, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(REMEDIES)}, or give FILE.py:FUNCTION"
        raise ValueError(f"unknown intervention {name!r}: {hint}")
    if not strength:
        return Intervention(name, remedy, math.nan if remedy.strength is None else remedy.strength)
    return Intervention(f"{name}:{strength}", remedy, _strength(name, remedy, strength))


def _strength(name: str, remedy: Remedy, text: str) -> float:
    if remedy.strength is None:
        raise ValueError(f"{name}:{text}: {name} has no strength, write {name}")
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name}:{text}: the strength must be a number, as in {name}:{remedy.strength:g}") from None
    if not remedy.low < value < math.inf or value > remedy.high or value == remedy.nothing:
        bounds = f"above {remedy.low:g}" + ("" if math.isinf(remedy.high) else f", at most {remedy.high:g}")
        apart = "" if remedy.nothing is None else f", and not {remedy.nothing:g}, which has no effect"
        raise ValueError(f"{name}:{text}: the strength must lie {bounds}{apart}")
    return value


def _own(place: str, name: str) -> Function:
    """Returns a function in a file, or in a module that can be imported. ValueError where there is none."""
    path = Path(place)
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise ValueError(f"{path}: there is no such file: write FILE.py:FUNCTION")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(f"{place}: there is no such module ({error}): write MODULE:FUNCTION") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {name!r}: write {place}:FUNCTION")
    return function

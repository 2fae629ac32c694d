"""The table of optimizers whose step is a formula (formula.py)."""

from __future__ import annotations

from collections.abc import Collection

import torch

from rl_training.optim.adamw import ADAM, ADAMW
from rl_training.optim.formula import StepFormula
from rl_training.optim.lion import LION
from rl_training.optim.sgd import SGD
from rl_training.statistics.unavailable import Unavailable

FORMULAS = (ADAMW, ADAM, SGD, LION)
NO_FORMULA = Unavailable(
    "no_formula",
    "the step of {optimizer} has no formula here, only those of {supported} do",
    fix="the probe named measured still measures its effect",
)


def formula_of(optimizer: torch.optim.Optimizer, readable: Collection[str] | None = None) -> StepFormula | Unavailable:
    """Return the formula of an optimizer's step, or why there is none.

    Args:
        optimizer: The optimizer. Its class must be exactly one of FORMULAS, because a subclass may step differently.
        readable: Full names of the classes whose states can be read in this kind of shard. None: all classes.
    """
    full_name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    formulas = {f.optimizer: f for f in FORMULAS if readable is None or f.optimizer in readable}
    if full_name not in formulas:
        # The message names the library, because bitsandbytes has an AdamW too, with 8-bit states.
        return NO_FORMULA.formatted(optimizer=_with_library(full_name), supported=list_names(formulas))
    formula = formulas[full_name]
    return formula.reason(optimizer) or formula


def _with_library(full_name: str) -> str:
    """Return "Muon" for torch's class, and "bitsandbytes' AdamW" for another library's."""
    library = full_name.partition(".")[0]
    name = full_name.rpartition(".")[2]
    return name if library == "torch" else f"{_possessive(library)} {name}"


def list_names(full_names: Collection[str]) -> str:
    """Return the classes as part of a sentence: "torch's AdamW, Adam and SGD, and bitsandbytes' Lion"."""
    by_library: dict[str, list[str]] = {}
    for full_name in full_names:
        by_library.setdefault(full_name.partition(".")[0], []).append(full_name.rpartition(".")[2])
    phrases = []
    for library, names in by_library.items():
        *first, last = names
        phrases.append(f"{_possessive(library)} {', '.join(first)}{' and ' * bool(first)}{last}")
    return ", and ".join(phrases)


def _possessive(library: str) -> str:
    return f"{library}'" if library.endswith("s") else f"{library}'s"

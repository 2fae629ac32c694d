"""A user's own intervention: a function in a file or module, called on copies so that it cannot change training."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_training.errors import UserError, wrap_user_errors
from rl_training.interventions.loss import LossInputs, Reweighting
from rl_training.step.loss_weights import LossWeights


def load_custom(place: str, name: str) -> Reweighting:
    """Load a function from a file or an importable module, and wrap it so that its result is checked.

    Args:
        place: FILE.py or MODULE.
        name: The function's name.

    Raises:
        UserError: If there is no such file, module or function.
    """
    path = Path(place)
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise UserError(f"{path}: there is no such file: write FILE.py:FUNCTION")
        module = importlib.util.module_from_spec(spec)
        with wrap_user_errors(place):
            spec.loader.exec_module(module)
    else:
        if importlib.util.find_spec(place.partition(".")[0]) is None:
            raise UserError(f"{place}: there is no such module: write FILE.py:FUNCTION or MODULE:FUNCTION")
        with wrap_user_errors(place):
            module = importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{place} has no function {name!r}: write {place}:FUNCTION")
    return functools.partial(_checked_weights, name, function)


def _checked_weights(name: str, function: Reweighting, loss: LossInputs, strength: float) -> LossWeights:
    """Call the function with a copy of the loss's inputs, and check the weights that it returns."""
    with wrap_user_errors(f"intervention {name}"):
        weights: Any = function(copy.deepcopy(loss), strength)
    if not isinstance(weights, LossWeights):
        raise UserError(f"intervention {name} returned {type(weights).__name__}: return LossWeights(logps, entropies)")
    logps = _checked(name, weights.logps, loss.weights.logps)
    return LossWeights(logps, None if weights.entropies is None else _checked(name, weights.entropies, logps))


def _checked(name: str, weights: Any, like: Tensor) -> Tensor:
    """Return weights in the dtype and on the device of `like`.

    Raises:
        UserError: If they are not a tensor, are not finite, or have another shape than `like`.
    """
    if isinstance(weights, Tensor) and weights.shape == like.shape and bool(torch.isfinite(weights).all()):
        return weights.detach().to(like)
    kind = f"a tensor of shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
    shape = tuple(like.shape)
    raise UserError(f"intervention {name} returned {kind} as weights: they must be finite and of shape {shape}")

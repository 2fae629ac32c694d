"""Whether a model draws random numbers in its forward pass: dropout that acts, router jitter, noise on embeddings.

Dropout is looked for in layers, numbers and code, because a config also holds probabilities that nothing reads.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
from types import CodeType
from typing import Any

from torch import nn

DROPOUT = (
    "dropout is on, and training draws other masks than probes do: an undeclared loss term, another temperature or "
    "another policy's log-probabilities are noticed only where they change more than dropout does: declare them"
)
MOST_DECORATORS = 20  # around one function; more, and an object wraps itself
DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property, functools.partialmethod)


def modules_with_dropout(model: nn.Module) -> list[nn.Module]:
    """Return the modules that apply dropout themselves while they are in training mode.

    These are layers of torch, and modules that call a function with a probability of their own or of the config. A
    config may also hold probabilities that nothing reads (GPT-2's summary_first_dropout), or that the layers made from
    it no longer have (after TRL's disable_dropout).
    """
    options = _positive_numbers(_config_options(model), "drop")
    return [module for module in model.modules() if _applies_dropout(module, options)]


def has_dropout(model: nn.Module) -> bool:
    """Return whether two passes over the same rows may differ because of dropout."""
    return any(module.training for module in modules_with_dropout(model))


def dropout_remark(model: nn.Module) -> str:
    """Return what dropout hides from the checks of a training run; "" if the model has none."""
    return DROPOUT if modules_with_dropout(model) else ""


def draws_noise(model: nn.Module) -> bool:
    """Return whether training's forward pass draws random numbers: dropout, router jitter, or noise on embeddings."""
    has_jitter = bool(_positive_numbers(_config_options(model), "jitter"))
    has_noise = any(getattr(module, "neftune_noise_alpha", None) for module in model.modules())
    return has_dropout(model) or has_jitter or has_noise


def _applies_dropout(module: nn.Module, options: Set[str]) -> bool:
    """Return whether a module applies dropout in training mode. `options` are the config's above 0."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    attributes = vars(module)
    if _positive_numbers(attributes, "drop"):
        return True
    candidates = options - attributes.keys()
    if not candidates:
        return False
    methods: list[Mapping[str, object]] = [vars(kind) for kind in type(module).__mro__ if not _is_general(kind)]
    methods.append({name: attributes[name] for name in ("forward",) if name in attributes})  # of this module alone
    return any(_may_read(candidates, functions) for functions in methods)


def _config_options(model: nn.Module) -> dict[str, Any]:
    """Return the options of the model's config, of a model with images those of its language model."""
    config = getattr(model, "config", None)
    return {} if config is None else config.get_text_config().to_dict()


def _positive_numbers(values: Mapping[str, Any], word: str) -> set[str]:
    """Return the names that contain a word and whose values are floats above 0."""
    return {name for name, value in values.items() if word in name and isinstance(value, float) and value > 0}


def _is_general(kind: type) -> bool:
    """Return whether a class is a base of any model. PreTrainedModel only reads dropout to choose an attention."""
    is_of_transformers = kind.__module__.startswith("transformers.") and ".models." not in kind.__module__
    return kind in (nn.Module, object) or is_of_transformers


def _may_read(options: Set[str], methods: Mapping[str, object]) -> bool:
    """Return whether a method may read one of these options: it names one, or `forward` has no code to look at.

    `__init__` does not count: what it reads, it stores in layers and numbers, which may have changed since.
    """
    for name, value in methods.items():
        code = None if name == "__init__" else _code_of(value)
        if code is None and name == "forward":
            return True
        if code is not None and not options.isdisjoint(_names_in_code(code)):
            return True
    return False


def _code_of(value: object) -> CodeType | None:
    """Return the code of a function, without decorators; None if there is none: TorchScript, or not a function."""
    for _ in range(MOST_DECORATORS):
        if not callable(value) and not isinstance(value, DESCRIPTORS):
            return None
        inner = (getattr(value, name, None) for name in ("__wrapped__", "__func__", "func", "fget"))
        wrapped = next((function for function in inner if function is not None), None)
        if wrapped is None:
            break
        value = wrapped
    code = getattr(value, "__code__", None)
    return code if isinstance(code, CodeType) else None


@functools.lru_cache(maxsize=4096)
def _names_in_code(code: CodeType) -> frozenset[str]:
    """Return the attributes that code names, its texts (`getattr(config, "dropout")`), and those of functions in it."""
    names = frozenset(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            names |= {constant}
        elif isinstance(constant, CodeType):
            names |= _names_in_code(constant)
    return names

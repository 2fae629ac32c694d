"""The precision of measurements: IEEE fp32 without dropout and without autocast, whatever training does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.parallel.sharding import dtype_name
from rl_training.policy.rng import preserve_rng
from rl_training.policy.rotary import preserve_rotary_tables

DROPOUT = (
    "dropout is on, and training draws other masks than probes do: an undeclared loss term, another temperature or "
    "another policy's log-probabilities are noticed only where they change more than dropout does: declare them"
)
# Largest mean difference per token, in nats, of log-probabilities that two passes compute for the same policy.
SAME_SCORES = 0.01
SAME_SCORES_ROUNDED = 0.1  # the same if passes compute in less than fp32
MOST_DECORATORS = 20  # around one function; more, and an object wraps itself
DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property, functools.partialmethod)
FP32_ATTENTION = ("eager", "sdpa", "flex_attention")  # transformers' other attention implementations may refuse fp32


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Make the model calculate as exactly as its weights allow inside the context, then restore everything.

    Run both forward and backward inside it. It does not change whether a graph is built.
    """
    device = next(model.parameters()).device.type
    with ieee_fp32(), without_dropout(model), _attention_in_fp32(model), torch.autocast(device, enabled=False):
        yield


@contextlib.contextmanager
def isolated_from_training(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run probe code with autocast off, even if the loop has it on; restore RNG state and rotary tables afterwards."""
    with preserve_rng(device), preserve_rotary_tables(model), torch.autocast(device.type, enabled=False):
        yield


@contextlib.contextmanager
def _with_values(values: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes inside the context, each given as (object, attribute, value), then restore them."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    try:
        for owner, name, value in values:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextlib.contextmanager
def ieee_fp32() -> Iterator[None]:
    """Switch TF32 off inside the context, then restore torch's settings.

    torch has new settings and old ones (allow_tf32, set_float32_matmul_precision), and reading an old one raises while
    it says otherwise than a new one. A model's code may read either, so both are set.
    """
    backends: Any = torch.backends
    convolutions = [(setting, "fp32_precision") for setting in (backends.cudnn.conv, backends.cudnn.rnn)]
    others = (backends.cuda.matmul, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
    settings = [*convolutions, *((setting, "fp32_precision") for setting in others)]
    with _with_values([(*setting, "ieee") for setting in settings]):
        matmul_precision = torch.get_float32_matmul_precision()
        with _with_values([(*setting, "tf32") for setting in convolutions]):
            allows_convolutions = _reads_true(backends.cudnn, "allow_tf32")
        try:
            torch.set_float32_matmul_precision("highest")
            backends.cudnn.allow_tf32 = False
            with _with_values([(*setting, "ieee") for setting in settings]):  # the old ones have changed them
                yield
        finally:
            torch.set_float32_matmul_precision(matmul_precision)
            backends.cudnn.allow_tf32 = allows_convolutions


def _reads_true(owner: Any, name: str) -> bool:
    """Return whether an old setting is True, while the new ones say what True means. If it is False, reading raises."""
    try:
        return bool(getattr(owner, name))
    except RuntimeError:
        return False


def rounding_reason(model: nn.Module) -> str:
    """Return why even a measurement computes in less than fp32; "" if it does not."""
    rounded = [
        (not param.requires_grad, f"{name} is {dtype_name(param.dtype)}")
        for name, param in model.named_parameters()
        if param.is_floating_point() and param.dtype.itemsize < 4
    ]
    for name, module in model.named_modules():
        if _is_quantised(module) and module.compute_dtype.itemsize < 4:
            rounded.append((True, f"{name} computes in {dtype_name(module.compute_dtype)}"))
    if not rounded:
        return ""
    first = min(rounded, key=lambda pair: pair[0])[1]  # trained weights first
    return f"{first}, so the model's numbers are rounded: load its weights in float32"


def _is_quantised(module: nn.Module) -> bool:
    return isinstance(getattr(module, "compute_dtype", None), torch.dtype)  # bitsandbytes' layers


def without_dropout(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context in which no module applies dropout.

    The flag `training` switches more than dropout, so some modules keep it. It also enables a layer's gradient
    checkpointing: if no dropout acts on the model, checkpointed layers keep the flag. bitsandbytes' layers never apply
    dropout. In evaluation mode on a CPU they would repack their weights for good and pass no gradients any more.
    """
    drops_out = bool(_modules_with_dropout(model))
    return _with_values([
        (module, "training", False)
        for module in model.modules()
        if module.training
        and (drops_out or not getattr(module, "gradient_checkpointing", False))
        and not _is_quantised(module)
    ])  # fmt: skip


def has_dropout(model: nn.Module) -> bool:
    """Return whether two passes over the same rows may differ because of dropout."""
    return any(module.training for module in _modules_with_dropout(model))


def half_dtypes(output: Tensor) -> set[torch.dtype]:
    """Return the floating dtypes below fp32 that occur in the graph of a tensor: what its forward pass computed in."""
    pending: list[Any] = [output.grad_fn]
    visited: set[Any] = set()
    dtypes: set[torch.dtype] = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            dtypes |= {metadata.dtype for metadata in node._input_metadata}
            pending.extend(next_node for next_node, _ in node.next_functions)
    return {dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize < 4}


def dropout_remark(model: nn.Module) -> str:
    """Return what dropout hides from the checks of a training run; "" if the model has none."""
    return DROPOUT if _modules_with_dropout(model) else ""


def draws_noise(model: nn.Module) -> bool:
    """Return whether training's forward pass draws random numbers: dropout, router jitter, or noise on embeddings."""
    has_jitter = bool(_positive_numbers(_config_options(model), "jitter"))
    has_noise = any(getattr(module, "neftune_noise_alpha", None) for module in model.modules())
    return has_dropout(model) or has_jitter or has_noise


def _modules_with_dropout(model: nn.Module) -> list[nn.Module]:
    """Return the modules that apply dropout themselves while they are in training mode.

    These are layers of torch, and modules that call a function with a probability of their own or of the config. A
    config may also hold probabilities that nothing reads (GPT-2's summary_first_dropout), or that the layers made from
    it no longer have (after TRL's disable_dropout).
    """
    options = _positive_numbers(_config_options(model), "drop")
    return [module for module in model.modules() if _applies_dropout(module, options)]


def _applies_dropout(module: nn.Module, options: Set[str]) -> bool:
    """Return whether a module applies dropout in training mode. `options` are the config's above 0."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    own = vars(module)
    if _positive_numbers(own, "drop"):
        return True
    candidates = options - own.keys()
    if not candidates:
        return False
    methods: list[Mapping[str, object]] = [vars(kind) for kind in type(module).__mro__ if not _is_general(kind)]
    methods.append({name: value for name, value in own.items() if name == "forward"})  # replaced on this module alone
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


def _attention_in_fp32(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the model's attention accepts fp32. Flash attention does not, so it is replaced."""
    configs: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    sdpa = all(getattr(module, "_supports_sdpa", True) for module in model.modules())
    return _with_values([
        (config, "_attn_implementation_internal", "sdpa" if sdpa else "eager")
        for config in configs.values()
        if getattr(config, "_attn_implementation", None) not in (None, *FP32_ATTENTION)
    ])  # fmt: skip

"""The precision of measurements, whatever training does: the parts of `Scorer.measuring`, and what rounds within."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.parallel.sharding import dtype_name
from rl_training.policy.buffers import preserve_buffers
from rl_training.policy.dropout import modules_with_dropout
from rl_training.policy.rng import preserve_rng
from rl_training.policy.rotary import preserve_rotary_tables

# Largest mean difference per token, in nats, of log-probabilities that two passes compute for the same policy.
# step/score_check.py lists which tolerance decides what.
SAME_SCORES = 0.01
SAME_SCORES_ROUNDED = 0.1  # the same if passes compute in less than fp32
FP32_ATTENTION = ("eager", "sdpa", "flex_attention")  # transformers' other attention implementations may refuse fp32


@contextlib.contextmanager
def isolated_from_training(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run probe code with autocast off, even if the loop has it on; restore RNG state and buffers afterwards."""
    autocast_off = torch.autocast(device.type, enabled=False)
    with preserve_rng(device), preserve_buffers(model), preserve_rotary_tables(model), autocast_off:
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
    """Return the reason why even a measurement computes in less than fp32; "" if it does not."""
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
    drops_out = bool(modules_with_dropout(model))
    return _with_values([
        (module, "training", False)
        for module in model.modules()
        if module.training
        and (drops_out or not getattr(module, "gradient_checkpointing", False))
        and not _is_quantised(module)
    ])  # fmt: skip


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


def attention_in_fp32(model: nn.Module) -> contextlib.AbstractContextManager[None]:
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

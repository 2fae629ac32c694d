"""How a measurement calculates: IEEE fp32 without dropout and without autocast, whatever training does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

FP32_ATTENTION = ("eager", "sdpa", "flex_attention")  # what transformers has beside them refuses fp32, or may


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """A context in which the model calculates as exactly as its weights allow; then everything is as it was.

    Run forward and backward inside it. It does not change whether a graph is built.
    """
    device = next(model.parameters()).device.type
    with ieee_fp32(), without_dropout(model), _attention_in_fp32(model), torch.autocast(device, enabled=False):
        yield


@contextlib.contextmanager
def ieee_fp32() -> Iterator[None]:
    """A context without TF32. By torch's new settings only: the old ones cannot be read once these were written."""
    backends: Any = torch.backends
    settings = [
        *(backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn),
        *(backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
    ]
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def why_not_fp32(model: nn.Module) -> str:
    """Returns why the model computes in less than fp32 even in a measurement, "" if it does not."""
    rounded = [
        (not param.requires_grad, f"{name} is {str(param.dtype).removeprefix('torch.')}")
        for name, param in model.named_parameters()
        if param.is_floating_point() and param.dtype.itemsize < 4
    ]
    for name, module in model.named_modules():
        if _is_quantised(module) and module.compute_dtype.itemsize < 4:
            rounded.append((True, f"{name} computes in {str(module.compute_dtype).removeprefix('torch.')}"))
    if not rounded:
        return ""
    first = min(rounded, key=lambda pair: pair[0])[1]  # of what is trained, if there is any
    return f"{first}, so the model's numbers are rounded: load its weights in float32"


def _is_quantised(module: nn.Module) -> bool:
    return isinstance(getattr(module, "compute_dtype", None), torch.dtype)  # bitsandbytes' layers


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """A context in which no module drops out. The flag `training` says more than that, so some keep it.

    It switches a layer's checkpointing on: where a model knows of no dropout, layers that are checkpointed stay so. And
    bitsandbytes' layers, which never drop out, repack their weights for good where they are evaluated on a CPU: no
    gradient would come through them any more.
    """
    in_training = [module for module in model.modules() if module.training]
    config = getattr(model, "config", None)
    options = {} if config is None else config.get_text_config().to_dict()
    drops_out = any("drop" in key and isinstance(value, float) and value > 0 for key, value in options.items())
    try:
        for module in in_training:
            checkpointed = getattr(module, "gradient_checkpointing", False)
            module.training = (checkpointed and not drops_out) or _is_quantised(module)
        yield
    finally:
        for module in in_training:
            module.training = True


@contextlib.contextmanager
def _attention_in_fp32(model: nn.Module) -> Iterator[None]:
    """A context in which the model's attention takes fp32, which flash attention refuses."""
    configs: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    before = [
        (config, config._attn_implementation)
        for config in configs.values()
        if getattr(config, "_attn_implementation", None) not in (None, *FP32_ATTENTION)
    ]
    sdpa = all(getattr(module, "_supports_sdpa", True) for module in model.modules())
    try:
        for config, _ in before:
            config._attn_implementation_internal = "sdpa" if sdpa else "eager"
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation

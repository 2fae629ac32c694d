"""A CPU platform for verl, which has none: gloo, and no accelerator.

It is named in VERL_USE_EXTERNAL_MODULES, with VERL_PLATFORM=cpu. What verl registers for "cuda" is plain PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Iterator
from typing import Any

import torch

os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")

from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import distributed


def device_module() -> types.ModuleType:
    """Return torch.cpu with what verl expects of an accelerator's module: memory counters that return 0."""
    module = types.ModuleType("torch.cpu for verl")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")})
    counters = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    nothing = dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "ipc_collect"), lambda *_, **__: None)
    module.__dict__.update(
        dict.fromkeys(counters, lambda *_, **__: 0) | nothing,
        get_device_name=lambda *_, **__: "CPU",
        mem_get_info=lambda *_, **__: (2**34, 2**34),
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = vendor_name = "cpu"  # properties in the base class; class attributes satisfy them
    device_module = device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM") == "cpu"  # never chosen by detection

    def current_device(self) -> Any:
        return torch.device("cpu")  # with an index, Tensor.to would mean a GPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # verl counts nodes by this resource; ray.init(num_gpus=N) declares any number of them

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


# verl would ask for the backend "cpu:gloo,cpu:gloo", which torch refuses.
distributed.initialize_global_process_group_ray = functools.partial(
    distributed.initialize_global_process_group_ray, backend="gloo"
)

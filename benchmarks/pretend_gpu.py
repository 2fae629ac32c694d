"""A simulated GPU: its small tensors hold values, its large tensors only a shape.

    with PretendGpu() as gpu:
        gpu.hold(model)     # moves the model's parameters to this GPU, which torch sees as its device "meta"
        …                   # a training
        gpu.launches, gpu.waits, gpu.live, gpu.peak, gpu.sent

Each operation on such tensors counts as one launch, unless it returns a view. The host waits for the GPU when it reads
a value, copies between CPU and GPU (unless `non_blocking`), or indexes with a mask. A small result of large tensors is
filled with ones. FSDP2 runs unmodified: its streams are stand-ins, and all collectives, its own included, only count
what they would send.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

import rl_training

GPU = torch.device("meta")
SMALL = 2**19  # tensors up to this number of entries hold values
READS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "masked_select", "equal"}
TAKES_BOTH = {"copy_", "_to_copy", "_foreach_copy_", "index", "index_put_", "_index_put_impl_"}  # CPU and GPU tensors
INDEXES = {"index", "index_put_", "_index_put_impl_"}
COLLECTIVES = ("all_gather_single", "all_reduce", "all_to_all_single", "reduce_scatter_single")
FSDP_WORK = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")  # FSDP2's own, not the probes'
PACKAGE = str(Path(rl_training.__file__).parent)


def _tensors_in(*values: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _tensors_in(*value)
    return tensors


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply the function to all items of nested lists and tuples. Takes half the time of torch's tree_map."""
    if isinstance(value, list | tuple):
        return type(value)(_mapped(function, part) for part in value)
    return function(value)


class OnGpu(Tensor):
    """A tensor of the simulated GPU. `inner` holds its values on the CPU, or is a meta tensor without values."""

    inner: Tensor
    gpu: PretendGpu

    @staticmethod
    def __new__(cls, inner: Tensor, gpu: PretendGpu) -> OnGpu:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=GPU
        )

    def __init__(self, inner: Tensor, gpu: PretendGpu) -> None:
        self.inner, self.gpu = inner, gpu

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(self._moved(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(self._moved(index), value)

    def __matmul__(self, other: Tensor) -> Tensor:  # for vector @ matrix torch would reshape a result in place
        return other.t().mv(self) if self.dim() == 1 and other.dim() == 2 else super().__matmul__(other)

    def _moved(self, index: Any) -> Any:  # torch would move a list to the GPU without a dispatched call
        if isinstance(index, tuple):
            return tuple(map(self._moved, index))
        return torch.tensor(index, device=GPU) if isinstance(index, list) else index

    def tolist(self) -> Any:
        self.gpu.wait("tolist")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu = next(x.gpu for x in _tensors_in(*args, *(kwargs or {}).values()) if isinstance(x, OnGpu))
        return gpu.run(func, args, kwargs or {})


class PretendGpu(TorchDispatchMode):
    """A context in which the device "meta" is the simulated GPU, and collectives only count what they would send."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.launches = 0  # bytes, bytes, operations
        self.waits: Counter[str] = Counter()  # by line of the package
        self.sent: Counter[str] = Counter()  # by kind of collective: bytes of the largest tensor in each call, summed
        self._holders: Counter[int] = Counter()  # by storage: tensors that use it
        self._sizes: dict[int, int] = {}  # by storage: bytes, 0 while it is freed
        self._counts = True
        self._undo = contextlib.ExitStack()

    def hold(self, model: nn.Module) -> None:
        """Move the model's parameters and buffers to this GPU. Tied parameters stay tied."""
        taken: dict[Tensor, Any] = {}
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    if param not in taken:
                        taken[param] = nn.Parameter(self._new(param.data), requires_grad=param.requires_grad)
                    module._parameters[name] = taken[param]
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else self._new(buffer)

    def start_counting(self) -> None:
        """Reset the counters to 0, and the peak to the bytes that are live now."""
        self.launches, self.peak, self.waits, self.sent = 0, self.live, Counter(), Counter()

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Stop counting launches and waits within this context."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def leave_out(self, owner: Any, *names: str) -> contextlib.AbstractContextManager[Any]:
        """Run these functions of a module or class uncounted within this context."""

        def uncounted(call: Callable[..., Any]) -> Any:
            @functools.wraps(call)
            def run(*args: Any, **kwargs: Any) -> Any:
                with self.uncounted():
                    return call(*args, **kwargs)

            return staticmethod(run) if isinstance(owner, type) else run

        return mock.patch.multiple(owner, **{name: uncounted(getattr(owner, name)) for name in names})

    def __enter__(self) -> PretendGpu:
        make, autocasts = torch.tensor, torch.is_autocast_enabled

        def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
            made = make(data, **kwargs)
            return made.to(GPU) if device is not None and torch.device(device) == GPU else made

        def new_tensor(like: Tensor, data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
            return tensor(data, dtype=dtype or like.dtype, device=device or like.device)

        def send(name: str, *args: Any, **kwargs: Any) -> None:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            self.sent[name] += max(x.numel() * x.element_size() for x in tensors)

        class Autocast(torch.autocast):
            def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
                super().__init__("cpu", *args, **kwargs)

        replaced: tuple[tuple[Any, str, Any], ...] = (
            (torch, "tensor", tensor),
            (Tensor, "new_tensor", new_tensor),
            (torch, "autocast", Autocast),
            (torch, "is_autocast_enabled", lambda device="cpu": autocasts("cpu")),
            *((dist, name, functools.partial(send, name)) for name in COLLECTIVES),
            (_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
            (_fsdp_param, "alloc_storage", lambda tensor: self._resize(tensor, tensor.numel() * tensor.itemsize)),
            (_fsdp_param, "free_storage", lambda tensor: self._resize(tensor, 0)),
        )
        handle = SimpleNamespace(
            **{name: getattr(torch.cpu, name) for name in ("Stream", "Event", "stream", "current_stream")},
            current_device=lambda: 0, device_count=lambda: 1, is_initialized=lambda: True,
        )  # fmt: skip
        self._undo.enter_context(mock.patch.object(torch, GPU.type, handle, create=True))
        self._undo.enter_context(self.leave_out(_fsdp_param_group, *FSDP_WORK))
        for owner, name, replacement in replaced:
            self._undo.enter_context(mock.patch.object(owner, name, replacement))
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._undo.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on values if those of all GPU tensors are known, otherwise on shapes."""
        name, returns = func._schema.name.split("::")[1], func._schema.returns
        tensors = _tensors_in(*args, *kwargs.values())
        ours = [x for x in tensors if isinstance(x, OnGpu)]
        if ours and name not in TAKES_BOTH and any(x.dim() for x in tensors if not isinstance(x, OnGpu)):
            raise RuntimeError(f"{name} got tensors of the CPU and of the GPU")
        device = kwargs.get("device")
        to_gpu = device is not None and torch.device(device).type == GPU.type
        if not ours and not to_gpu:
            return func(*args, **kwargs)
        to_cpu, is_view = (
            device is not None and not to_gpu,
            any(r.alias_info and not r.alias_info.is_write for r in returns),
        )
        is_asynchronous = bool(kwargs.get("non_blocking", name == "copy_" and args[2:3] == (True,)))
        self._count(name, args, len(ours) < len(tensors), to_cpu, is_view, is_asynchronous)
        known = all(x.inner.device.type == "cpu" for x in ours)
        if name == "_local_scalar_dense":
            return func(ours[0].inner) if known else 1.0
        target = args[0] if func._schema.is_mutable else None
        if isinstance(target, OnGpu) and not known and target.inner.device.type == "cpu":
            return target if returns else None  # known values are not overwritten by unknown ones
        where = torch.device("cpu" if known else "meta")

        def inner(x: Any) -> Any:
            x = x.inner if isinstance(x, OnGpu) else x
            return x.to(where) if isinstance(x, Tensor) and x.dim() and x.device != where else x

        if device is not None:
            kwargs = {**kwargs, "device": where}
        outputs = func(*_mapped(inner, args), **{key: _mapped(inner, value) for key, value in kwargs.items()})
        if func._schema.is_mutable:
            return args[0] if outputs is not None and returns else None
        if to_cpu:
            return outputs if known else torch.ones_like(outputs, device="cpu")
        wrap = self._wrapped if is_view else self._new
        wrapped = _mapped(lambda x: wrap(x) if isinstance(x, Tensor) else x, outputs)
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if is_view else wrapped

    def wait(self, what: str) -> None:
        """Count a wait for the line of the package that causes it."""
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if self._counts and frame is not None:
            self.waits[f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} {what}"] += 1

    def _count(self, name: str, args: Any, is_mixed: bool, to_cpu: bool, is_view: bool, is_asynchronous: bool) -> None:
        self.launches += self._counts and not is_view and "empty" not in name
        is_transfer = (name == "_to_copy" and (to_cpu or is_mixed)) or (name == "copy_" and is_mixed)
        if name in READS or (is_transfer and not is_asynchronous):
            self.wait(name)
        for index in args[1] if name in INDEXES else ():
            if isinstance(index, Tensor) and (index.dtype == torch.bool or not isinstance(index, OnGpu)):
                self.wait(name)

    def _new(self, values: Tensor) -> OnGpu:
        if values.numel() > SMALL:
            return self._wrapped(values if values.device == GPU else values.to(GPU))
        return self._wrapped(values if values.device.type == "cpu" else torch.ones_like(values, device="cpu"))

    def _wrapped(self, inner: Tensor) -> OnGpu:
        tensor, storage = OnGpu(inner, self), inner.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._set_size(key, storage.nbytes())
        self._holders[key] += 1
        weakref.finalize(tensor, self._drop, key)
        return tensor

    def _resize(self, tensor: Tensor, size: int) -> None:
        assert isinstance(tensor, OnGpu)
        self._set_size(tensor.inner.untyped_storage()._cdata, size)

    def _set_size(self, key: int, size: int) -> None:
        self.live += size - self._sizes.get(key, 0)
        self.peak = max(self.peak, self.live)
        self._sizes[key] = size

    def _drop(self, key: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.live -= self._sizes.pop(key)

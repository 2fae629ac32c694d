"""A GPU that is not there: small tensors on it have values, large ones a shape alone.

    with PretendGpu() as gpu:
        gpu.hold(model)     # its parameters are on torch's device "meta", and pass for tensors of this GPU
        …                   # a training
        gpu.launches, gpu.waits, gpu.live, gpu.peak, gpu.sent

An operation on such tensors counts as one launch, unless it returns a view. A wait is where the host waits for a GPU:
it reads a value, copies between the two, or indexes with a mask. What would be a small result of large tensors is ones.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

import rl_training

GPU = torch.device("meta")
SMALL = 2**19  # entries whose values are known
READS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "masked_select", "equal"}
INDEXES = {"index", "index_put_", "_index_put_impl_"}
PACKAGE = str(Path(rl_training.__file__).parent)


class OnGpu(Tensor):
    """A tensor of that GPU. `inner` has its values, on the CPU, or none, on "meta"."""

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

    def __matmul__(self, other: Tensor) -> Tensor:  # of a vector and a matrix torch changes a result's shape in place
        return other.t().mv(self) if self.dim() == 1 and other.dim() == 2 else super().__matmul__(other)

    def _moved(self, index: Any) -> Any:  # torch would move a list without asking
        if isinstance(index, tuple):
            return tuple(map(self._moved, index))
        return torch.tensor(index, device=GPU) if isinstance(index, list) else index

    def tolist(self) -> Any:
        self.gpu.wait("tolist")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu = next(x.gpu for x in tree_leaves((args, kwargs)) if isinstance(x, OnGpu))
        return gpu.run(func, args, kwargs or {})


class PretendGpu(TorchDispatchMode):
    """A context in which the device "meta" is this GPU, and collectives only count what they would send."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.launches = self.sent = 0
        self.waits: Counter[str] = Counter()  # by line of the package
        self._holders: Counter[int] = Counter()  # tensors of each storage
        self._counts = True
        self._undo = contextlib.ExitStack()

    def hold(self, model: nn.Module) -> None:
        """Takes the model's parameters and buffers; tied ones stay tied."""
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
        """Sets the counters to 0, and the peak to what is held now."""
        self.launches, self.sent, self.peak, self.waits = 0, 0, self.live, Counter()

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """A context whose launches, waits and peaks are not counted."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def __enter__(self) -> PretendGpu:
        make, autocasts = torch.tensor, torch.is_autocast_enabled

        def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
            made = make(data, **kwargs)
            return made.to(GPU) if device is not None and torch.device(device) == GPU else made

        def new_tensor(like: Tensor, data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
            return tensor(data, dtype=dtype or like.dtype, device=device or like.device)

        def send(*tensors: Any, **kwargs: Any) -> None:
            last = [x for x in tensors if isinstance(x, Tensor)][-1]
            self.sent += last.numel() * last.element_size()

        class Autocast(torch.autocast):
            def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
                super().__init__("cpu", *args, **kwargs)

        replaced: tuple[tuple[Any, str, Any], ...] = (
            (torch, "tensor", tensor),
            (Tensor, "new_tensor", new_tensor),
            (torch, "autocast", Autocast),
            (torch, "is_autocast_enabled", lambda device="cpu": autocasts("cpu")),
            (dist, "all_to_all_single", send),
            (dist, "all_reduce", send),
        )
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
        """Runs an operation: on values where all are known, else on shapes."""
        name, returns = func._schema.name.split("::")[1], func._schema.returns
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        ours = [x for x in tensors if isinstance(x, OnGpu)]
        device = kwargs.get("device")
        to_gpu = device is not None and torch.device(device) == GPU
        if not ours and not to_gpu:
            return func(*args, **kwargs)
        to_cpu, is_view = (
            device is not None and not to_gpu,
            any(r.alias_info and not r.alias_info.is_write for r in returns),
        )
        self._count(name, args, len(ours) < len(tensors), to_cpu, is_view)
        known = all(x.inner.device.type == "cpu" for x in ours)
        if name == "_local_scalar_dense":
            return func(ours[0].inner) if known else 1.0
        target = args[0] if func._schema.is_mutable else None
        if isinstance(target, OnGpu) and not known and target.inner.device.type == "cpu":
            return target  # what is known stays so
        where = torch.device("cpu" if known else "meta")

        def inner(x: Any) -> Any:
            x = x.inner if isinstance(x, OnGpu) else x
            return x.to(where) if isinstance(x, Tensor) and x.dim() and x.device != where else x

        if device is not None:
            kwargs = {**kwargs, "device": where}
        found = func(*tree_map(inner, args), **tree_map(inner, kwargs))
        if func._schema.is_mutable:
            return args[0] if found is not None else None
        if to_cpu:
            return found if known else torch.ones_like(found, device="cpu")
        wrap = self._wrapped if is_view else self._new
        wrapped = tree_map(lambda x: wrap(x) if isinstance(x, Tensor) else x, found)
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if is_view else wrapped

    def wait(self, what: str) -> None:
        """Counts a wait, of the line of the package that asks for it."""
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if self._counts and frame is not None:
            self.waits[f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} {what}"] += 1

    def _count(self, name: str, args: Any, is_mixed: bool, to_cpu: bool, is_view: bool) -> None:
        self.launches += self._counts and not is_view and "empty" not in name
        if name in READS or (name == "_to_copy" and (to_cpu or is_mixed)) or (name == "copy_" and is_mixed):
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
        key, size = storage._cdata, storage.nbytes()
        self.live += 0 if self._holders[key] else size
        self.peak = max(self.peak, self.live if self._counts else 0)
        self._holders[key] += 1
        weakref.finalize(tensor, self._drop, key, size)
        return tensor

    def _drop(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.live -= size

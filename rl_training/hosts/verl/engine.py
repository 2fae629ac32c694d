"""verl's FSDP2 engine, which reports each optimizer step to the probes and trains as it would without them.

A subclass under the platform's own vendor, a key that verl looks up before its own. What is to be measured comes with
the data, from trainer.py; without that nothing is. The reference policy comes by the same key, and never trains.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name, get_vendor
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches

from rl_training.hosts.verl.measurement import SETTINGS, Measurement

VERSIONS = (0, 9)  # whose engine this is written against: its interface is said to change


class ProbedEngine(FSDPEngineWithLMHead):
    """See the module's docstring."""

    _measurement: Measurement | None = None
    _checkpoint: Path | None = None  # that training goes on from
    _open: Measurement | None = None  # the same, while a step is measured

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        settings = tensordict_utils.get(data, SETTINGS)
        if settings is None:
            return super().train_batch(data, loss_function)
        if self._measurement is None:
            self._measurement = Measurement(self, settings, loss_function, data, self._checkpoint)
        microbatches = prepare_micro_batches(data=data, dp_group=self.get_data_parallel_group())[0]
        self._open = self._measurement
        try:
            self._open.begin(settings, [len(part) for part in microbatches])
            outputs = super().train_batch(data, loss_function)
            outputs["metrics"] |= self._open.finish(outputs)
        finally:
            self._open.driver.disarm()
            self._open = None
        return outputs

    def forward_step(self, micro_batch: TensorDict, loss_function: Callable[..., Any], forward_only: bool) -> Any:
        measurement = self._open
        if measurement is None:
            return super().forward_step(micro_batch, loss_function, forward_only)

        def watched(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None) -> Any:
            seen = measurement.microbatch(model_output, data)
            return loss_function(model_output=seen, data=data, dp_group=dp_group)

        return super().forward_step(micro_batch, watched, forward_only)

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        result = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if self._open is not None and "entropy" not in result:
            self._open.keep_entropies(output.logits, micro_batch)
        return result

    def optimizer_step(self) -> Any:
        if self._open is None:
            return super().optimizer_step()
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        # The condition under which verl skips the step: then there is none, and parameters and states stay.
        if not torch.isfinite(torch.nn.utils.get_total_norm(gradients)):
            self._open.driver.abandon()
            return super().optimizer_step()
        self._open.gradients_ready()
        norm = super().optimizer_step()
        self._open.stepped(norm)
        return norm

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(local_path, *args, **kwargs)
        if self._measurement is not None:
            self._measurement.save(Path(local_path))

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().load_checkpoint(local_path, *args, **kwargs)
        self._checkpoint = Path(local_path)


def register() -> None:
    """Registers the engine with verl, once. ValueError for a verl whose engine is another."""
    installed = version("verl")
    if tuple(map(int, installed.split(".")[:2])) != VERSIONS:
        raise ValueError(f"probes are written against verl 0.9, and this is {installed}: pip install 'verl>=0.9,<0.10'")
    for name, method in vars(ProbedEngine).items():
        if inspect.isfunction(method):
            ours = [p.name for p in inspect.signature(method).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
            of_verl = list(inspect.signature(getattr(FSDPEngineWithLMHead, name)).parameters)
            if of_verl[: len(ours)] != ours:
                raise ValueError(
                    f"verl's engine has {name}({', '.join(of_verl)}), and probes expect ({', '.join(ours)}): "
                    "pip install 'verl>=0.9,<0.10'"
                )
    device = os.getenv("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.getenv("VERL_ENGINE_VENDOR") or get_vendor()
    EngineRegistry.register("language_model", ["fsdp2"], device, vendor)(ProbedEngine)

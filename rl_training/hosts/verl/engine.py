"""verl's FSDP2 engine with probes: it reports each optimizer step to them, and trains exactly as without them.

The engine is a subclass, registered for the platform's own vendor, a key that verl looks up before its default. A
message from trainer.py comes with the data; without one nothing is measured. verl also makes the reference policy from
this class, which never trains.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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

from rl_training.hosts.verl.loop_spec import end_tokens_of, loop_spec_of
from rl_training.hosts.verl.measurement import Measurement
from rl_training.hosts.verl.members import ENGINE_METHODS, refuse_other_methods
from rl_training.hosts.verl.message import BATCH_KEY


class ProbedEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine, which runs probes if its data come with a message from the trainer.

    Its methods are in the order in which verl calls them in a step. All of verl's own passes come to `forward_step` and
    `prepare_model_outputs`, also those that only score: they are watched during `train_batch` alone.
    """

    # Class attributes, so that verl's __init__ stays as it is.
    _measurement: Measurement | None = None  # made at the first step, since the model is complete then
    _resumed_from: Path | None = None  # folder of the checkpoint that was loaded before the first step
    _active_measurement: Measurement | None = None  # `_measurement` during a `train_batch` with a message, else None

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        """Make an optimizer step. verl calls this for each mini-batch of a rollout, with this rank's rows."""
        message = tensordict_utils.get(data, BATCH_KEY)
        if message is None:
            return super().train_batch(data, loss_function)
        if self._measurement is None:
            training = message["training"]
            loop = loop_spec_of(self, training, loss_function, data, self._sizes_of_microbatches(data))
            self._measurement = Measurement(loop, training, end_tokens_of(self, training), self._resumed_from)
        measurement = self._active_measurement = self._measurement
        try:
            measurement.begin(message["rollout"], lambda: self._sizes_of_microbatches(data))
            outputs = super().train_batch(data, loss_function)
            outputs["metrics"] |= measurement.finish(outputs)
        except BaseException:
            measurement.fail()
            raise
        finally:
            self._active_measurement = None
        return outputs

    def _sizes_of_microbatches(self, data: TensorDict) -> list[int]:
        """Return the numbers of sequences in the microbatches of a step. Collective.

        verl cuts the batch later, in this way. If it cut otherwise, numbers would be nan with `other_sizes`.
        """
        microbatches = prepare_micro_batches(data=data, dp_group=self.get_data_parallel_group())[0]
        return [len(part) for part in microbatches]

    def forward_step(self, micro_batch: TensorDict, loss_function: Callable[..., Any], forward_only: bool) -> Any:
        """Run a microbatch's forward pass and its loss. verl runs its backward next."""
        measurement = self._active_measurement
        if measurement is None:
            return super().forward_step(micro_batch, loss_function, forward_only)

        def watched_loss(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None) -> Any:
            watched = measurement.microbatch(model_output, data)
            return loss_function(model_output=watched, data=data, dp_group=dp_group)

        return super().forward_step(micro_batch, watched_loss, forward_only)

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        """Return log-probabilities and entropies of a forward pass, while its logits are there."""
        result = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if self._active_measurement is not None and "entropy" not in result:
            result |= self._active_measurement.entropies(output.logits, micro_batch)
        return result

    def optimizer_step(self) -> Any:
        """Clip the gradient, make the step, and return the norm before clipping."""
        if self._active_measurement is None:
            return super().optimizer_step()
        return self._active_measurement.optimizer_step(super().optimizer_step, self._gradient_norm)

    def _gradient_norm(self) -> Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save verl's checkpoint, with the probes' states."""
        super().save_checkpoint(local_path, *args, **kwargs)
        if self._measurement is not None:
            self._measurement.save(Path(local_path))

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load verl's checkpoint. The probes' states follow at the first step, which makes the probes."""
        super().load_checkpoint(local_path, *args, **kwargs)
        self._resumed_from = Path(local_path)


def register() -> None:
    """Register the engine with verl, once in each process.

    Raises:
        UserError: Methods of verl's engine are not those that this one overrides.
    """
    refuse_other_methods(FSDPEngineWithLMHead, ENGINE_METHODS)
    device = os.getenv("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.getenv("VERL_ENGINE_VENDOR") or get_vendor()
    EngineRegistry.register("language_model", ["fsdp2"], device, vendor)(ProbedEngine)

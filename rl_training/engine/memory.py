"""What outlives a step and is shared by its probes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.engine.attribution import Attribution
from rl_training.engine.fold_products import PRODUCTS
from rl_training.engine.shards import Shard
from rl_training.engine.step import EntropySettings
from rl_training.engine.updates import UpdateHistory
from rl_training.mathematics.running_variance import RunningVariance


class StepMemory:
    """What outlives a step and goes into the checkpoint: δθ of the one before, and variances of the last few."""

    def __init__(self, shard: Shard, settings: EntropySettings, offload: bool = False) -> None:
        self.settings = settings
        self.device = "cpu" if offload else None  # of what is kept by fold; None: the parameters'
        self.errors = RunningVariance(settings.error_decay)
        self.history = UpdateHistory(shard)
        self.attribution = Attribution(shard.layout.names)

    @property
    def num_bytes(self) -> int:
        return self.history.num_bytes

    def state_dict(self) -> dict[str, Tensor]:
        return self.history.state_dict() | {f"error.{k}": value for k, value in self.errors.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.history.load_state_dict(state)
        prefix = "error."
        errors = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        rows = len(PRODUCTS) + len(self.attribution.labels) + self.settings.per_sequence
        if errors and len(errors["sum"]) > rows:
            # A checkpoint of an earlier version has a row of `own_prompts`, the fourth, which is no longer measured.
            errors = {name: torch.cat([rows[:3], rows[4:]]) for name, rows in errors.items()}
        self.errors.load_state_dict(errors)

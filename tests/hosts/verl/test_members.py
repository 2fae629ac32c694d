"""What is relied on in verl is there, and a change of it is named before training."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl.workers")

from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from rl_training.errors import UserError
from rl_training.hosts.verl.engine import ProbedEngine
from rl_training.hosts.verl.members import ENGINE_METHODS, TRAINER_METHODS, refuse_other_methods
from rl_training.hosts.verl.trainer import ProbedTrainer


@pytest.mark.parametrize(
    ("kind", "ours", "methods"),
    [(FSDPEngineWithLMHead, ProbedEngine, ENGINE_METHODS), (PPOTrainerSync, ProbedTrainer, TRAINER_METHODS)],
)
def test_every_overridden_method_of_verl_is_checked_and_is_as_known(kind: type, ours: type, methods: Any) -> None:
    overridden = {name for name in vars(ours) if name != "__init__" and callable(getattr(kind, name, None))}
    assert overridden - {"__doc__", "__module__", "__abstractmethods__"} == set(methods)
    refuse_other_methods(kind, methods)


class Later(FSDPEngineWithLMHead):
    """A later verl, as it may be."""

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool, step: int) -> Any: ...


class Renamed:
    """A later verl, without a method."""


def test_a_method_that_verl_has_changed_is_named() -> None:
    with pytest.raises(UserError, match=r"^Later\.forward_step takes \(micro_batch, .*, step\) in verl"):
        refuse_other_methods(Later, ENGINE_METHODS)
    with pytest.raises(UserError, match=r"^Renamed\._balance_batch is gone in verl"):
        refuse_other_methods(Renamed, TRAINER_METHODS)

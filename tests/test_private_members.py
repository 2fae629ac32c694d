"""Another version of a library is refused by the name of what it has lost, before anything runs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import pytest
from accelerate import Accelerator
from trl import GRPOTrainer

from rl_training import attach
from rl_training.hosts.trl import patches
from rl_training.hosts.trl.patches import METHODS, TRAINER_ATTRIBUTES, WRITTEN_FOR, Method
from rl_training.probes import EffectiveSampleSizeProbe


@pytest.fixture
def trainer(make_trainer: Callable[..., GRPOTrainer]) -> GRPOTrainer:
    return make_trainer()


def test_the_installed_versions_are_those_that_the_table_was_written_for() -> None:
    for library, version in WRITTEN_FOR.items():
        assert importlib.metadata.version(library).startswith(f"{version}.")


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_method_that_is_gone_is_named(method: Method, trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(method.owner, method.name)
    for owner in [c for c in type(trainer).__mro__ if method.name in vars(c)]:
        monkeypatch.delattr(owner, method.name)
    monkeypatch.setattr(method.owner, f"{method.name}_renamed", original, raising=False)
    with pytest.raises(ValueError, match=rf"written for \w+ [\d.]+, found [\d.]+: {method} is gone; install"):
        attach(trainer, [EffectiveSampleSizeProbe()])


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_method_with_other_parameters_is_named(
    method: Method, trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(method.owner, method.name, lambda self, something_else: None)
    with pytest.raises(ValueError, match=rf"{method} takes \(something_else\), not \({method.parameters[0]}, "):
        attach(trainer, [EffectiveSampleSizeProbe()])


@pytest.mark.parametrize("name", TRAINER_ATTRIBUTES)
def test_an_attribute_that_is_gone_is_named(name: str, trainer: GRPOTrainer) -> None:
    delattr(trainer, name)
    with pytest.raises(ValueError, match=f"GRPOTrainer.{name} is gone"):
        attach(trainer, [EffectiveSampleSizeProbe()])


def test_a_wrapper_of_forward_that_hides_the_original_is_named(
    trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare_model(self: Accelerator, model: object) -> object:
        return model

    monkeypatch.setattr(private_members.Accelerator, "prepare_model", prepare_model)
    with pytest.raises(ValueError, match=r"Accelerator.prepare_model no longer sets _original_forward"):
        attach(trainer, [EffectiveSampleSizeProbe()])

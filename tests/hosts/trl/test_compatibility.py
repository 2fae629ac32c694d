"""A version of a library that lacks something or returns something else is refused by name before anything runs."""

from __future__ import annotations

import configparser
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from packaging.requirements import Requirement
from trainers import FEW, trained_weights, trainer_maker
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from rl_training import attach
from rl_training.hosts.trl import versions
from rl_training.hosts.trl.members import METHODS, SHUFFLE
from rl_training.hosts.trl.versions import NUM_SCORES
from rl_training.probes import EffectiveSampleSizeProbe


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    """Return a trainer that all tests share, since a refusal leaves it as it was."""
    return trainer_maker(tmp_path_factory.mktemp("trainer"))(GRPOTrainer, use_cpu=True, bf16=False)


def test_the_supported_trl_version_is_the_installed_one_and_that_of_setup_cfg() -> None:
    assert Requirement(versions.WRITTEN_FOR).specifier.contains(trl.__version__)
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[3] / "setup.cfg")
    assert versions.WRITTEN_FOR in setup["options"]["install_requires"].splitlines()
    assert versions.WRITTEN_FOR.replace("trl", "trl[vllm]") in setup["options.extras_require"]["vllm"].splitlines()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("renamed", [True, False])
def test_a_trl_method_that_is_missing_or_has_other_parameters_is_named(
    name: str, renamed: bool, trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if renamed:
        for owner in [c for c in type(trainer).__mro__ if name in vars(c)]:
            monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(GRPOTrainer, name, lambda self, something_else: None)
    fix = re.escape(f"pip install '{versions.WRITTEN_FOR}'")
    gone = rf"GRPOTrainer.{name}\({METHODS[name][0]}.*\) .* trl [\d.]+: {fix}$"
    with pytest.raises(ValueError, match=gone):
        attach(trainer, probes=[EffectiveSampleSizeProbe()])


def test_a_missing_shuffle_is_named(trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(grpo_trainer, SHUFFLE)
    with pytest.raises(ValueError, match=f"grpo_trainer.{SHUFFLE} "):
        attach(trainer, probes=[EffectiveSampleSizeProbe()])


def test_a_wrapped_method_takes_arguments_that_a_subclass_adds(
    trainer: GRPOTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: dict[str, tuple] = {}

    def widened(name: str) -> Callable[..., None]:
        return lambda self, *args, stage="": heard.update({name: (*args, stage)})

    monkeypatch.setattr(
        trainer, "__class__", type("Widened", (GRPOTrainer,), {name: widened(name) for name in METHODS})
    )
    with attach(trainer, probes=[], whole_prompts=True):
        wrapped = METHODS.keys() & vars(trainer).keys()
        assert len(wrapped) == 10
        for name in wrapped:
            getattr(trainer, name)(str(tmp_path), {}, stage="warmup")
    assert {name: heard[name] for name in wrapped} == dict.fromkeys(wrapped, (str(tmp_path), {}, "warmup"))


# --- what a method returns ----------------------------------------------------------------------------------------

Scores = tuple[torch.Tensor, ...]
CHANGED: dict[str, tuple[Callable[[Scores], Any], str]] = {
    "one thing less": (lambda scores: scores[:-1], f"does not return {NUM_SCORES} values"),
    "one tensor": (lambda scores: torch.stack(scores[:2]), f"does not return {NUM_SCORES} values"),
    "all columns": (
        lambda scores: (scores[0].repeat(1, 2), *scores[1:]),
        r"log-probabilities .* are of shape \(4, \d+\)",
    ),
    "flat": (lambda scores: (scores[0], scores[1].flatten(), *scores[2:]), r"entropies .* are of shape \(\d+,\)"),
    "no entropies": (lambda scores: (scores[0], None, *scores[2:]), "entropies .* are no tensor"),
}


class OfThisShape(GRPOTrainer):
    """Its loss does not use what the changed method returns, like the loss of another version may."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        columns = inputs["completion_ids"].shape[1]
        self._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), columns, compute_entropy=True)
        return model(input_ids=ids).logits.float().mean()


@pytest.mark.parametrize("kind", CHANGED)
def test_a_method_with_another_return_value_is_refused_in_its_first_forward_pass(make_trainer, kind: str) -> None:
    change, message = CHANGED[kind]
    trainer = make_trainer(GRPOTrainer, **FEW, max_steps=1)
    trainer.__class__ = OfThisShape
    original = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: change(original(*args, **kwargs))
    before = trained_weights(trainer)
    with (
        attach(trainer, probes=[EffectiveSampleSizeProbe()]),
        pytest.raises(ValueError, match=f"{message} in trl .*: pip install"),
    ):
        trainer.train()
    assert torch.equal(trained_weights(trainer), before)

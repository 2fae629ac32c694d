"""The tables of members and versions are complete and true of the installed TRL: `make compat` runs them on several."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl.models
from trainers import FEW, every_probe, trained_weights
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from rl_training import attach
from rl_training.hosts.trl import compatibility, versions
from rl_training.hosts.trl.members import (
    FORWARD_PASS,
    LATER_ATTRIBUTES,
    METHODS,
    SETTINGS,
    TRAINER_ATTRIBUTES,
    ZERO_MEMBERS,
)
from rl_training.hosts.trl.sharding import DEEPSPEED, Zero, Zero3
from rl_training.hosts.trl.versions import OF_ARGUMENTS, OF_TRAINER, is_installed

ROOT = Path(__file__).parents[3]
PLAIN: dict[str, Any] = {
    "trainer_class": GRPOTrainer,
    "config_class": GRPOConfig,
    "use_cpu": True,
    "bf16": False,
    **FEW,
}


# --- what is read -----------------------------------------------------------------------------------------------------

READ: set[str] = set()  # attributes of the trainer that this package has read
READ_SETTINGS: set[str] = set()  # attributes of its arguments


def reads_of(caller: Any) -> bool:
    """Whether code of this package reads, other than what records all settings of a run, whatever they are."""
    module = caller.f_globals.get("__name__", "")
    return module.startswith("rl_training.") and not module.endswith((".recorded_settings", ".settings.recorded"))


class Read(GRPOTrainer):
    def __getattribute__(self, name: str) -> Any:
        if reads_of(sys._getframe(1)):
            READ.add(name)
        return super().__getattribute__(name)


class ReadSettings(GRPOConfig):
    def __getattribute__(self, name: str) -> Any:
        if reads_of(sys._getframe(1)):
            READ_SETTINGS.add(name)
        return super().__getattribute__(name)


def test_everything_read_from_a_trainer_and_its_settings_is_in_the_tables(make_trainer, tmp_path: Path) -> None:
    """Of a training with all probes that is saved, its fresh samples, its hidden responses, and its removal."""
    trainer = make_trainer(
        **PLAIN | {"trainer_class": Read, "config_class": ReadSettings}, loss_type="dr_grpo", beta=0.1,
        mask_truncated_completions=True, save_strategy="steps", save_steps=1, max_steps=1,
    )  # fmt: skip
    with attach(trainer, tmp_path / "run", every_probe(num_folds=2), whole_prompts=True, strict=True):
        trainer.train()
    known = {*METHODS, *TRAINER_ATTRIBUTES, *LATER_ATTRIBUTES, *OF_TRAINER}
    read = {name for name in READ if not re.fullmatch("__.*__", name)}
    assert read - known == set()
    settings = {name for name in READ_SETTINGS if not re.fullmatch("__.*__", name)}
    assert settings - {*SETTINGS, *OF_ARGUMENTS} == set()
    assert len(read) > 40
    assert len(settings) > 20


def test_everything_that_the_code_names_on_a_trainer_or_its_settings_is_in_the_tables() -> None:
    """Also what no training above has reached. versions.py names the members of older versions."""
    named: dict[str, set[str]] = {"trainer": set(), "args": set()}
    for path in (ROOT / "rl_training/hosts/trl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))) if path.name != "versions.py" else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                named.get(owner.lstrip("_"), set()).add(node.attr)
    assert named["trainer"] - {*METHODS, *TRAINER_ATTRIBUTES, *LATER_ATTRIBUTES} == set()
    assert named["args"] - {*SETTINGS, "target_kl_share"} == set()  # a field of DrGRPOConfig


def test_everything_that_the_code_names_on_deepspeeds_optimizer_is_in_its_table() -> None:
    named = {
        node.attr
        for node in ast.walk(ast.parse((ROOT / "rl_training/hosts/trl/sharding.py").read_text("utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("zero", "self._zero")
    }
    named |= {Zero.FLAT_WEIGHTS, Zero3.FLAT_WEIGHTS}
    assert named == {name for members in ZERO_MEMBERS.values() for name in members}


@pytest.mark.parametrize("kind", [Zero, Zero3])
def test_a_member_that_deepspeeds_optimizer_lacks_is_named(kind: type[Zero]) -> None:
    pytest.importorskip("deepspeed")
    members = dict.fromkeys(ZERO_MEMBERS[kind.KIND])
    for name in members:
        optimizer = type(kind.KIND, (), {other: None for other in members if other != name})()
        with pytest.raises(ValueError, match=f"^{kind.KIND}.{name} .*pip install '{re.escape(DEEPSPEED)}'"):
            kind(SimpleNamespace(optimizer=optimizer))
    assert DEEPSPEED in (ROOT / "setup.cfg").read_text("utf-8")


def test_every_missing_attribute_and_setting_is_named_when_probes_are_attached(make_trainer, monkeypatch) -> None:
    trainer = make_trainer(**PLAIN)
    removable = [name for name in TRAINER_ATTRIBUTES if name in vars(trainer)]  # others are properties of the class
    assert len(removable) > 25
    for name in removable:
        value = vars(trainer).pop(name)
        with pytest.raises(ValueError, match=f"^GRPOTrainer.{name} .*pip install"):
            attach(trainer, probes=["ess"])
        setattr(trainer, name, value)
    monkeypatch.setattr(compatibility, "SETTINGS", (*SETTINGS, "of_no_version"))
    with pytest.raises(ValueError, match=r"^GRPOConfig.of_no_version .*pip install"):
        attach(trainer, probes=["ess"])


# --- what differs -----------------------------------------------------------------------------------------------------


def test_each_newer_member_exists_exactly_since_the_version_in_its_row(make_trainer) -> None:
    trainer = make_trainer(**PLAIN)
    for owner, table in ((trainer, OF_TRAINER), (trainer.args, OF_ARGUMENTS)):
        for name, row in table.items():
            assert hasattr(owner, name) == is_installed(row.since), name
    forward = getattr(GRPOTrainer, FORWARD_PASS)
    unwrap = inspect.signature(trl.models.unwrap_model_for_generation).parameters
    assert versions.IMAGE_POSITIONS in versions.parameters_of(forward)
    assert ("gradient_checkpointing_kwargs" in unwrap) == is_installed("trl 1.16.0")
    assert hasattr(grpo_trainer, "entropy_from_logits") == (not is_installed("trl 1.14.0"))
    of_1_14 = is_installed("trl 1.14.0") and not is_installed("trl 1.15.0")
    assert hasattr(grpo_trainer, "selective_log_softmax_and_entropy") == of_1_14


def test_a_trainer_of_an_older_version_is_read_like_a_newer_one_and_nothing_is_set_on_it(make_trainer) -> None:
    trainer = make_trainer(**PLAIN)
    for name in OF_TRAINER:
        vars(trainer).pop(name, None)
    trainer.vllm_importance_sampling_cap = 3.0
    before = {*vars(trainer)}
    ends = [trainer.processing_class.eos_token_id]
    expected = [ends, None, False, None, 3.0]
    assert [versions.of_trainer(trainer, name) for name in OF_TRAINER] == expected
    assert not versions.generation_calls_code(trainer)
    trainer.environments = [object()]
    assert versions.generation_calls_code(trainer)
    assert {*vars(trainer)} == before
    bare = object()
    assert [versions.setting(bare, name) for name in OF_ARGUMENTS] == [0.0, False, False]


def test_versions_are_compared_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, since in (
        ("1.14.2", False),
        ("1.14.10", True),
        ("1.15.0.dev0", True),
        ("2.0", True),
        ("1.9.9", False),
    ):
        monkeypatch.setattr(versions.metadata, "version", lambda library, installed=installed: installed)
        assert is_installed.__wrapped__("trl 1.14.3") == since, installed


def test_the_metadata_of_a_library_is_read_once_per_version(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(versions.metadata, "version", lambda library: asked.append(library) or "2.0")
    assert [is_installed("trl 1.99.7") for _ in range(3)] == [True] * 3
    assert asked == ["trl"]


def test_a_trl_whose_loss_needs_a_gpu_is_refused_on_the_cpu_in_one_line(make_trainer, monkeypatch) -> None:
    trainer = make_trainer(**PLAIN)
    monkeypatch.setattr(versions, "trl_version", "1.15.0")
    before = trained_weights(trainer)
    with pytest.raises(ValueError, match=r"^trl 1\.15\.0 .* GPU .*: pip install 'trl!=1\.15\.\*'$"):
        attach(trainer, probes=["ess"])
    assert before.equal(trained_weights(trainer))


# --- settings of a version to come ------------------------------------------------------------------------------------


@dataclasses.dataclass
class OfTomorrow(GRPOConfig):
    sharper_loss: float = 0.0
    more_samples: list[int] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize(("given", "named"), [({"sharper_loss": 0.5}, ["sharper_loss=0.5"]), ({}, [])])
def test_a_setting_that_is_not_known_is_named_at_the_start_if_it_is_set(
    make_trainer: Callable[..., Any], monkeypatch, caplog, given: dict[str, Any], named: list[str]
) -> None:
    monkeypatch.setattr(compatibility, "GRPOConfig", OfTomorrow)
    trainer = make_trainer(**PLAIN | {"config_class": OfTomorrow}, **given)
    attach(trainer, probes=["ess"]).remove()
    lines = [line for line in caplog.messages if "unknown to this version of rl-training" in line]
    assert [line.split(" of ")[0] for line in lines] == named
    assert all(line.endswith("check loss and sampling") for line in lines)


def test_every_setting_of_the_installed_version_is_known() -> None:
    own = {field.name for field in dataclasses.fields(GRPOConfig)} - {*TrainingArguments.__dataclass_fields__}
    assert own - versions.KNOWN_SETTINGS == set()

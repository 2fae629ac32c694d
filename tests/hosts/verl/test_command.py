"""The command accepts verl's own arguments, installs what it imports, and refuses other versions of verl."""

from __future__ import annotations

import configparser
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl.workers")

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rl_training.hosts.verl import __main__ as command
from rl_training.hosts.verl.__main__ import with_probe_choice
from rl_training.job.configuration.shipped import CONF

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SETTINGS = [
    f"{ACTOR}.strategy=fsdp2", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", f"{ROLLOUT}.name=stub",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
    "trainer.device=cpu", "trainer.n_gpus_per_node=1",
]  # fmt: skip


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that returns the settings with which these arguments would start verl's loop."""
    started: list[Any] = []
    monkeypatch.setattr(command, "run_ppo", lambda config, task_runner_class: started.append(config))
    monkeypatch.chdir(tmp_path)

    def compose(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["verl", *with_probe_choice(list(arguments))])
        command.run()
        return started.pop()

    return compose


def test_a_users_config_may_have_its_own_search_path_and_flags_in_any_place(composed: Any, tmp_path) -> None:
    (tmp_path / "groups" / "mine").mkdir(parents=True)
    (tmp_path / "groups" / "mine" / "fast.yaml").write_text(f"# @package {ACTOR}.optim\nlr: 0.25\n")
    (tmp_path / "own.yaml").write_text(
        f"hydra:\n  searchpath: [file://{tmp_path}/groups]\ndefaults: [ppo_trainer, mine: fast, _self_]\n"
    )
    for flags in (["--config-dir", str(tmp_path), "--config-name", "own"], [f"--config-dir={tmp_path}", "-cn", "own"]):
        for arguments in ([*flags, *SETTINGS], [*SETTINGS, *flags]):
            config = composed(*arguments)
            assert config.actor_rollout_ref.actor.optim.lr == 0.25
            assert {*config.probes} >= {"simple", "measured"}  # probe=all


def test_every_probe_can_be_chosen(composed: Any) -> None:
    """Also probes whose files read settings that verl's configuration lacks."""
    names = [path.stem for path in (CONF / "probe").glob("*.yaml") if path.stem not in ("all", "none")]
    config = composed(*SETTINGS, f"probe=[{','.join(names)}]", "probes.simple.every=4")
    assert set(config.probes) == set(names)
    assert (config.probes.ground_truth.seed, config.probes.simple.every) == (0, 4)


def test_all_probes_are_the_default_and_a_choice_is_added_to_verls_settings() -> None:
    assert with_probe_choice(["probe=simple", "data.seed=1"]) == ["+probe=simple", "data.seed=1"]
    assert with_probe_choice(["--config-name", "a", "data.seed=1", "--cfg", "job"]) == [
        "--config-name", "a", "+probe=all", "data.seed=1", "--cfg", "job"
    ]  # fmt: skip
    assert with_probe_choice(["--cfg", "job"]) == ["--cfg", "job", "+probe=all"]


def test_a_refused_setting_ends_the_command_with_one_line(composed: Any, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        composed(*SETTINGS, f"{ROLLOUT}.n=1")
    assert ended.value.code == 2
    assert re.fullmatch(rf"error: {ROLLOUT}\.n=1: .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("installed", ["0.8.0", "0.10.1"])
def test_another_version_of_verl_is_refused_before_an_import_fails(installed: str, monkeypatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: installed)
    monkeypatch.setitem(sys.modules, "verl.workers.engine", None)  # importing it fails
    for name in [name for name in sys.modules if name.startswith("rl_training.hosts.verl")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=rf"{installed}.* pip install 'verl>=0.9,<0.10'"):
        importlib.import_module("rl_training.hosts.verl")


def test_our_extra_installs_what_verls_trainer_imports() -> None:
    """The wheel alone does not install what verl's trainer imports. Its extra verl-core does, with much for CUDA."""
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[3] / "setup.cfg")
    ours = names_of(setup["options.extras_require"]["verl"].split("\n"))
    brought = ours | {name for library in ours for name in names_of(importlib.metadata.requires(library) or [])}
    in_core = names_of(importlib.metadata.requires("verl") or [], extra="verl-core")
    owners = importlib.metadata.packages_distributions()
    imported = {canonicalize_name(owner) for name in set(sys.modules) & set(owners) for owner in owners[name]}
    assert (imported & in_core) - brought == {"pytest"}  # pytest runs this test


def names_of(lines: Iterable[str], extra: str = "") -> set[str]:
    """Return the names of the requirements without an extra, or of those for one extra."""
    names = [line for line in lines if line and ('extra == "' in line) == bool(extra) and extra in line]
    return {canonicalize_name(Requirement(line).name) for line in names}

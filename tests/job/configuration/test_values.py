"""Values that can be checked on their own are checked before any slow import, with one line that names the fix."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from configs import REFUSED, composed, composing, refusal
from omegaconf import OmegaConf

from rl_training.errors import UserError
from rl_training.job.configuration.nested import load_plain
from rl_training.job.configuration.prepare import prepare_analysis, prepare_evaluation, prepare_run
from rl_training.job.configuration.run_settings import run_settings
from rl_training.job.configuration.shipped import CONF
from rl_training.job.configuration.sweep import analysis_folder_name
from rl_training.job.evaluation.checkpoints import find_checkpoints
from rl_training.offline.settings import (
    EvaluationSettings,
    KernelSettings,
    LogSettings,
    Settings,
    SweepSettings,
    TruthSettings,
    UpdateSettings,
)

PREPARE: dict[str, Any] = {
    "train": (prepare_run, "run_dir=somewhere"),
    "offline": (prepare_analysis, "checkpoint=somewhere"),
    "evaluate": (prepare_evaluation,),
}


def test_checks_of_settings_import_neither_torch_nor_trl() -> None:
    modules = ("configuration.prepare", "errors")
    lines = ["import sys", *(f"import rl_training.job.{name}" for name in modules)]
    lines.append("sys.exit(', '.join({'torch', 'trl', 'transformers'} & sys.modules.keys()))")
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert ended.stderr.strip() == ""


@pytest.mark.parametrize(
    ("command", "overrides", "message"),
    [(command, *row) for command, rows in REFUSED["values"].items() for row in rows.items()],
)
def test_invalid_settings_are_refused(command: str, overrides: str, message: str | list[str]) -> None:
    check, *needed = PREPARE[command]
    with pytest.raises(ValueError, match=refusal(message)):
        check(composed(command, *needed, *overrides.split()))


def test_settings_of_an_analysis_have_the_defaults_of_its_file() -> None:
    defaults = json.loads(json.dumps(dataclasses.asdict(Settings())))
    written = load_plain(CONF / "offline.yaml")
    assert defaults == {key: written[key] for key in defaults}


GROUPS = [group.name for group in dataclasses.fields(Settings)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: EvaluationSettings(overlap="forbiden"), "evaluation.overlap=forbiden: choose from forbidden, allowed"),
        (lambda: EvaluationSettings(source="test"), "evaluation.source=test: choose train, eval, or a list of rows"),
        (lambda: EvaluationSettings(source=[]), "evaluation.source=[]: choose train, eval, or a list of rows"),
        (lambda: EvaluationSettings(source=[3, -1]), "evaluation.source=-1 must be a whole number, at least 0"),
        (lambda: UpdateSettings(filtered="false"), "update.filtered='false' must be true or false"),
        (lambda: TruthSettings(etas=[1.0, -1.0]), "truth.etas=-1.0 must be a number above 0: a multiple of the step"),
        (lambda: KernelSettings(source="fixd"), "kernel.source=fixd: choose from own, fixed"),
        (lambda: KernelSettings(memory_gb=0), "kernel.memory_gb=0 must be a number above 0"),
        (lambda: KernelSettings(memory_gb="8"), "kernel.memory_gb='8' must be a number above 0"),
        (lambda: LogSettings(level="all"), "log.level=all: choose from none, minimal, standard, detailed, debug"),
        (lambda: EvaluationSettings(source=5), "evaluation.source=5: choose train, eval, or a list of rows"),
        (lambda: TruthSettings(etas=1.0), "truth.etas=1.0 must be a list: [1.0]"),
        (lambda: TruthSettings(etas=()), "truth.etas=[] measures no step"),
        (lambda: SweepSettings(update_seeds=3), "sweep.update_seeds=3 must be a list: [3]"),
        (lambda: SweepSettings(update_filtered=True), "sweep.update_filtered=True must be a list: [True]"),
        (lambda: SweepSettings(update_prompts=[1]), "sweep.update_prompts=1 must be a whole number, at least 2"),
        *((lambda group=group: Settings(**{group: None}), f"{group}=None must be ") for group in GROUPS),  # type: ignore[misc]
        (lambda: Settings(kernel={"enabled": True}), "kernel={'enabled': True} must be KernelSettings(…)"),  # type: ignore[arg-type]
    ],
)
def test_settings_of_an_analysis_made_in_python_are_checked_too(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        make()


def test_a_logger_that_is_not_installed_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fix = r"^logger=trackio: .*pip install 'rl-training\[trackio\]'"
    with pytest.raises(ValueError, match=fix):
        prepare_run(composed("train", "logger=trackio", "run_dir=somewhere"))
    prepare_run(composed("train", "logger=none", "run_dir=somewhere"))


def test_null_and_boundary_values_are_accepted_where_allowed() -> None:
    taken = ("++trainer.epsilon_high=null", "++trainer.top_p=1", "++trainer.min_p=0", "trainer.max_steps=-1")
    assert prepare_run(composed("train", *taken, "run_dir=somewhere")).num_microbatches == 8


@pytest.mark.parametrize(
    ("command", "overrides"),
    {
        "train": ["model=hub", "data=gsm8k", "run_dir='~/a'", "resume='~/a'", "model.name='~/a'", "data.path='~/a'"],
        "offline": ["checkpoint=['~/a','~/a']", "output='~/a'", "runs_dir='~/a'", "log.directory='~/a'"],
        "evaluate": ["run='~/a'", "checkpoints=['~/a']", "output='~/a'", "+model.name='~/a'", "+data.path='~/a'"],
    }.items(),
)
def test_a_tilde_is_expanded_in_every_path(
    command: str, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = composed(command, *overrides)
    prepared = PREPARE[command][0](cfg)
    read = OmegaConf.to_yaml(prepared.cfg if command == "train" else prepared.values)
    assert "~" not in read
    assert read.count(f"{tmp_path}/a\n") == str(overrides).count("~")


def test_a_tilde_before_the_name_of_no_user_is_kept() -> None:
    cfg = composed("train", "run_dir='~nobody-of-this-name/r'")
    assert prepare_run(cfg).cfg.run_dir == "~nobody-of-this-name/r"


def test_a_mistyped_folder_of_a_resumed_run_does_not_start_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "run_a" / "training_state").mkdir(parents=True)
    prepare_run(composed("train", f"run_dir={tmp_path / 'run_a'}", "resume=latest"))
    with pytest.raises(ValueError, match=rf"run_aa .* run_dir={tmp_path}/run_a\?"):
        prepare_run(composed("train", f"run_dir={tmp_path / 'run_aa'}", "resume=latest"))


def test_the_name_of_a_sweep_job_is_sanitized_without_changing_its_settings() -> None:
    prepared = prepare_analysis(composed("offline", "checkpoint=somewhere", "evaluation.source=[3,4]"))
    assert prepared.settings.evaluation.source == [3, 4]
    assert analysis_folder_name("default,evaluation.source=[3,4]") == "default,evaluation.source=3,4"
    folders = [analysis_folder_name(f"default,data.path={path}") for path in ("/a/b", "/ab", "ab")]
    assert len({*folders}) == 3, folders
    assert folders[2] == "default,data.path=ab"
    assert not any("/" in folder for folder in folders)
    assert analysis_folder_name("mine-2_a.b") == "mine-2_a.b"


def test_a_run_whose_config_lacks_data_is_analyzed_with_given_data(tmp_path: Path) -> None:
    checkpoint = tmp_path / "training_state" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    cfg = composed("train", "run_dir=somewhere")
    OmegaConf.set_struct(cfg, False)
    del cfg["data"]
    OmegaConf.save(cfg, tmp_path / "config.yaml", resolve=True)
    with composing():
        with pytest.raises(ValueError, match=r"config\.yaml .*\bdata\b.* data=…$"):
            run_settings(checkpoint, [])
        changed = run_settings(checkpoint, ["data=arithmetic", "model=tiny", "model.dtype=bfloat16"])
    assert changed.data._target_.endswith("arithmetic")
    assert changed.model.dtype == "bfloat16"  # not listed in conf/model/tiny.yaml, but its loader accepts it


def test_a_project_whose_folder_holds_any_config_yaml_is_not_the_run_of_a_checkpoint_in_it(tmp_path: Path) -> None:
    """A checkpoint of another trainer in PROJECT/outputs, and a copied one without its run's settings."""
    (tmp_path / "config.yaml").write_text("site: mine")
    outside = tmp_path / "outputs" / "checkpoint-1"
    copied = tmp_path / "copied" / "training_state" / "checkpoint-1"
    given = ["data=arithmetic", "model=tiny"]
    for checkpoint in (outside, copied):
        checkpoint.mkdir(parents=True)
        with composing():
            assert run_settings(checkpoint, given).data._target_.endswith("arithmetic")
            with pytest.raises(ValueError, match=r"is not in a run .* give model=… data=…"):
                run_settings(checkpoint, [])
        run, _ = find_checkpoints(None, [str(checkpoint)])
        assert run is None

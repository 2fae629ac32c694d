"""branch= starts a new run from another run's checkpoint. Without changes it is bitwise the original."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from configs import QUICK, REFUSED, composing
from hydra import compose
from safetensors.torch import load_file

from rl_training.job.configuration.overrides import force_add
from rl_training.job.configuration.prepare import prepare_run
from rl_training.job.configuration.run_settings import resolve_branch
from rl_training.job.errors import Interrupted
from rl_training.job.run.training import TrainingRun, build_run
from rl_training.records.folder import CONFIG_FILE, LOGS_FOLDER, TRAINING_STATE
from rl_training.records.jsonl import read_metrics

SMALL = [
    *QUICK, "batch.sequences_per_step=16", "batch.microbatch_size=8", "trainer.max_completion_length=12",
    "trainer.max_steps=3", "trainer.save_steps=1", "trainer.save_total_limit=9",
    "++trainer.learning_rate=1e-3", "++trainer.adam_beta2=0.95",
]  # fmt: skip


def run_of(folder: Path, *overrides: str) -> TrainingRun:
    words = [f"run_dir={folder}", *overrides]
    typed = [force_add(word) for word in words] if overrides[0].startswith("branch=") else words
    with composing():
        return build_run(prepare_run(resolve_branch(compose("train", overrides=typed), words)))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = run_of(tmp_path_factory.mktemp("branch") / "original", *SMALL, "probe=simple")
    run.train()
    return run.run_dir


def checkpoint(run: Path, step: int) -> Path:
    return run / TRAINING_STATE / f"checkpoint-{step}"


def branch(original: Path, folder: Path, *overrides: str, step: int = 1) -> TrainingRun:
    run = run_of(folder, f"branch={checkpoint(original, step)}", *overrides)
    run.train()
    return run


def assert_the_same_end(first: Path, other: Path, step: int = 3) -> None:
    for file in ("model.safetensors", "probes.safetensors"):
        ends = [load_file(checkpoint(run, step) / file) for run in (first, other)]
        assert ends[0].keys() == ends[1].keys()
        for name in ends[0]:  # two folds give no error bars, so nan must equal nan
            torch.testing.assert_close(ends[0][name], ends[1][name], rtol=0, atol=0, equal_nan=True)
    optimizers = [torch.load(checkpoint(run, step) / "optimizer.pt") for run in (first, other)]
    assert str(optimizers[0]["param_groups"]) == str(optimizers[1]["param_groups"])
    for name in ("loss", "reward", "learning_rate", "delta_h/forward"):
        logged = [{r["step"]: r[name] for r in read_metrics(run / LOGS_FOLDER)}.get(step) for run in (first, other)]
        assert logged[0] == logged[1]


def test_a_branch_without_changes_is_the_original_bit_for_bit(original: Path, tmp_path: Path) -> None:
    run = branch(original, tmp_path / "same")
    assert_the_same_end(original, run.run_dir)
    assert [row["step"] for row in read_metrics(run.run_dir / LOGS_FOLDER)] == [2, 3]
    config = yaml.safe_load((run.run_dir / CONFIG_FILE).read_text())
    assert config["provenance"]["branch"] == "of original at step 1"
    assert config["provenance"]["loss"] == "Dr-GRPO"
    assert config["trainer"]["output_dir"] == f"{tmp_path}/same/{TRAINING_STATE}"


def test_optimizer_and_schedule_have_the_settings_of_the_branch(original: Path, tmp_path: Path) -> None:
    """The schedule is linear to 0 at step 4, scaled to the branch's new rate. The betas are new too."""
    changed = ["trainer.lr_scheduler_type=linear", "++trainer.learning_rate=4e-3", "++trainer.adam_beta1=0.5"]
    run = branch(original, tmp_path / "new", *changed, "trainer.max_steps=4", "trainer.save_steps=2")
    rates = [row["learning_rate"] for row in read_metrics(run.run_dir / LOGS_FOLDER)]
    assert rates == pytest.approx([3e-3, 2e-3, 1e-3])
    assert all(group["betas"] == (0.5, 0.95) for group in run.trainer.optimizer.param_groups)
    kept = (run.run_dir / TRAINING_STATE).glob("checkpoint-*")
    assert sorted(path.name for path in kept) == ["checkpoint-2", "checkpoint-4"]


def test_a_stopped_branch_ends_at_its_own_last_step_when_resumed_as_it_says(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both additional steps count from the original's checkpoint, also where the command is repeated."""
    changed = ["intervention=[psr,lr:0.5]", "++trainer.entropy_coef=0.1", "probe=none"]
    whole = branch(original, tmp_path / "whole", *changed).run_dir
    assert load_file(checkpoint(whole, 3) / "model.safetensors").keys()
    config = yaml.safe_load((whole / CONFIG_FILE).read_text())
    assert config["provenance"]["loss"] == "Dr-GRPO except for entropy_coef=0.1, intervention=psr, intervention=lr:0.5"
    stopped, typed = tmp_path / "stopped", [*changed, "additional_steps=2"]
    run = run_of(stopped, f"branch={checkpoint(original, 1)}", *typed)
    run.stop.request.on_signal(signal.SIGTERM, None)
    run.train()
    monkeypatch.setattr(sys, "argv", ["train.py", *map(force_add, typed)])  # as the command makes them
    with pytest.raises(Interrupted) as ended:
        run.end()
    said, words = str(ended.value).split("; to continue, repeat the command with this appended: ")
    assert said == "ended by SIGTERM after step 2 of 3"
    branch(original, stopped, *typed, *shlex.split(words))
    assert not checkpoint(stopped, 4).exists()
    ends = [load_file(checkpoint(run, 3) / "model.safetensors") for run in (whole, stopped)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    plain = load_file(checkpoint(original, 3) / "model.safetensors")
    assert not all(torch.equal(ends[0][name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("overrides", "step", "said"),
    [
        *((overrides, 1, said) for overrides, said in REFUSED["branch"].items()),
        ("", 3, "has taken 3 steps, and trainer.max_steps=3: give a larger one, or additional_steps=20"),
        ("", 7, "there is no such folder"),
    ],
)
def test_invalid_branches_are_refused(original, tmp_path, overrides: str, step: int, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        run_of(tmp_path / "new", f"branch={checkpoint(original, step)}", *overrides.split())
    assert not (tmp_path / "new" / CONFIG_FILE).exists()


@pytest.mark.parametrize("given", ["", "latest", "auto"])
def test_a_branch_without_a_checkpoint_says_what_to_give(tmp_path: Path, given: str) -> None:
    with pytest.raises(ValueError, match=f"^branch={given}: .*RUN/training_state/checkpoint-N"):
        run_of(tmp_path / "new", f"branch={given}")


def test_a_branch_is_not_written_into_the_checkpoint_folder_of_its_origin(original: Path) -> None:
    for folder in (checkpoint(original, 1), checkpoint(original, 2), original / TRAINING_STATE):
        with pytest.raises(ValueError, match=f"run_dir={folder} "):
            run_of(folder, f"branch={checkpoint(original, 1)}")
        assert not (folder / CONFIG_FILE).exists()


def test_a_branch_takes_typed_overrides_and_no_defaults_of_train_yaml(original: Path, tmp_path: Path) -> None:
    """The run has 16 sequences per step, no dashboard, and a probe with settings, unlike train.yaml."""
    changed = ["batch.microbatch_size=4", "probes.simple.every=2", "logger=tensorboard", "seed=7"]
    run = run_of(tmp_path / "new", f"branch={checkpoint(original, 1)}", *changed)
    saved = yaml.safe_load((run.run_dir / CONFIG_FILE).read_text())
    assert saved["batch"] == {"sequences_per_step": 16, "microbatch_size": 4}
    assert saved["trainer"]["per_device_train_batch_size"] == 4
    assert saved["trainer"]["seed"] == saved["seed"] == 7
    assert saved["trainer"]["report_to"] == ["tensorboard"]
    assert saved["trainer"]["max_completion_length"] == 12
    assert saved["probes"]["simple"] | {"every": 2} == saved["probes"]["simple"]
    assert len(run.loggers) == 1


def test_a_tilde_is_expanded_in_the_folders_that_a_branch_names(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "first").symlink_to(original)
    run = run_of(Path("'~/new'"), "branch='~/first'", "additional_steps=1", "probe=none")
    assert run.run_dir == tmp_path / "new"
    saved = yaml.safe_load((run.run_dir / CONFIG_FILE).read_text())
    assert saved["trainer"]["output_dir"] == f"{tmp_path}/new/{TRAINING_STATE}"
    assert saved["branch"] == str(checkpoint(original, 3))


def test_another_seed_samples_other_responses_and_warns_of_another_prompt_order(
    original: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ends = [branch(original, tmp_path / seed, f"seed={seed}", "probe=none").run_dir for seed in "78"]
    assert "seed=7 (was 0), trainer" not in caplog.text
    assert "seed=7 (was 0): this branch takes its prompts in another order than its run" in caplog.text
    losses = [[row["loss"] for row in read_metrics(run / LOGS_FOLDER)] for run in (*ends, original)]
    assert losses[0] != losses[1]
    assert losses[0] != losses[2][1:]


def test_a_checkpoint_outside_a_run_is_refused(original: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(checkpoint(original, 1), tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match=rf"{alone} .*RUN/training_state/checkpoint-N"):
        run_of(tmp_path / "new", f"branch={alone}")

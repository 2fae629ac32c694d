"""A run killed at any moment and resumed ends like the uninterrupted one. Half-written checkpoints are never used."""

from __future__ import annotations

import logging
import os
import random
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import forks
import pytest
import torch
from configs import QUICK, composed, quick_run
from full_disk import files_of_at_most
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import save_file
from trainers import FEW, logged_numbers

from rl_training import DrGRPOTrainer, Estimate, Probe
from rl_training.errors import UserError
from rl_training.job.configuration.checks import check_resume
from rl_training.job.run.folder import open_run_folder
from rl_training.job.run.training import TrainingRun
from rl_training.probes import GradientNoiseScaleProbe, SimpleEntropyProbe
from rl_training.records.checkpoint_flaws import find_flaw
from rl_training.records.checkpoint_states import PROBE_STATES, load_probe_states, save_probe_states
from rl_training.records.checkpoints import find_checkpoint, set_aside_later, steps_taken
from rl_training.records.folder import TRAINING_STATE
from rl_training.records.jsonl import METRICS_FILE, PROBES_FILE, read_estimates, read_metrics
from rl_training.records.writer import Records
from rl_training.version import VERSION

SMALL = ["trainer.max_steps=3", "trainer.save_steps=1", "trainer.save_total_limit=9", "batch.microbatch_size=8"]
# The required parts of a checkpoint, in the order in which they are written.
PARTS = [
    "model.safetensors", "optimizer.pt", "scheduler.pt", "probes.safetensors", "rng_state.pth", "trainer_state.json",
]  # fmt: skip


def test_a_run_killed_at_random_moments_ends_bitwise_equal_to_the_uninterrupted_one() -> None:
    """With real SIGKILLs: one at a random moment, one when a checkpoint starts being written."""
    short = [*QUICK, "batch.sequences_per_step=16", "trainer.max_steps=4"]
    ended = forks.run("tests/support/kill_resume.py", "--kills", "2", "probe=simple", *short)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 kills of 1 process" in ended.stdout
    assert "bitwise the same as uninterrupted" in ended.stdout


# --- where checkpoints are written --------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [{"steps_per_generation": 4}, {"num_iterations": 2}], ids=lambda d: next(iter(d)))
def test_checkpoints_lie_between_rollouts_and_resume_to_the_same_end(
    make_trainer: Callable[..., DrGRPOTrainer], tmp_path: Path, caplog: pytest.LogCaptureFixture, reuse: dict[str, int]
) -> None:
    settings = {**FEW, **reuse, "save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole = make_trainer(probes=[SimpleEntropyProbe()], **settings)
    whole.train()
    folder = tmp_path / "state"
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    assert "checkpoints are written every 4 steps, not every 3" in caplog.text
    resumed = make_trainer(probes=[SimpleEntropyProbe()], **settings)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    for (name, a), b in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert logged_numbers(resumed) == logged_numbers(whole)


def test_a_last_step_within_a_rollout_is_saved_with_a_warning_of_inexact_resuming(
    make_trainer, tmp_path, caplog
) -> None:
    settings = {**FEW, "steps_per_generation": 4, "save_strategy": "steps", "save_steps": 2}
    make_trainer(**settings, max_steps=1).train()
    assert "the last checkpoint, of step 1, is inside one" in caplog.text
    make_trainer(**settings, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "state" / "checkpoint-1"))
    assert "step 1, where this run resumes, is inside one" in caplog.text


# --- which checkpoint is chosen -----------------------------------------------------------------------------------


def run_of(folder: Path, *overrides: str) -> TrainingRun:
    """Build a run of three steps with a checkpoint at each, in this process."""
    return quick_run(folder, *SMALL, *overrides)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = run_of(
        tmp_path_factory.mktemp("trained") / "run",
        "probe=[simple,gns,ground_truth]",
        "probes.ground_truth.sequences=16",
    )
    run.train()
    return run.run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_checkpoint_with_a_truncated_file_is_not_used(run_dir, part: str, kept: float, caplog) -> None:
    file = run_dir / TRAINING_STATE / "checkpoint-3" / part
    assert find_flaw(file.parent) == ""
    os.truncate(file, int(kept * file.stat().st_size))
    assert part in find_flaw(file.parent)
    with pytest.raises(ValueError, match=f"{part}.* checkpoint-N "):
        find_checkpoint(str(file.parent), run_dir)
    assert find_checkpoint("latest", run_dir).name == "checkpoint-2"
    assert f"skipping {file.parent}: {find_flaw(file.parent)}" in caplog.messages


@pytest.mark.parametrize("part", ["model.safetensors", "optimizer.pt"])
def test_flipped_bytes_are_found_and_their_file_is_named(run_dir: Path, part: str) -> None:
    """They are in the middle of the file, within a tensor's numbers, where only a checksum can detect them."""
    file = run_dir / TRAINING_STATE / "checkpoint-3" / part
    content = bytearray(file.read_bytes())
    for position in random.Random(0).sample(range(len(content) // 4, len(content) * 3 // 4), 64):
        content[position] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{part} .*checksum.* checkpoint-N "):
        find_checkpoint(str(file.parent), run_dir)
    assert find_checkpoint("latest", run_dir).name == "checkpoint-2"


def resume_beside_others(rank: int, run_dir: str) -> None:
    """Open a run's folder to resume it, and write what this rank said and found."""
    said = logging.FileHandler(f"{run_dir}/said_{rank}")
    logging.getLogger("rl_training.records.checkpoints").addHandler(said)
    start = open_run_folder(composed("train", f"run_dir={run_dir}", "resume=latest", *QUICK, *SMALL))
    Path(run_dir, f"found_{rank}").write_text(str(start.checkpoint))


def test_of_two_processes_one_checks_the_checkpoints_and_both_resume_the_same(run_dir: Path) -> None:
    newest = run_dir / TRAINING_STATE / "checkpoint-3"
    os.truncate(newest / "model.safetensors", 9)
    forks.start_ranks(resume_beside_others, (str(run_dir),), 2)
    said = [(run_dir / f"said_{rank}").read_text() for rank in (0, 1)]
    assert said[0].startswith(f"skipping {newest}: ")
    assert said[1] == ""
    for rank in (0, 1):
        assert (run_dir / f"found_{rank}").read_text() == str(newest.with_name("checkpoint-2"))


def test_latest_without_a_run_is_the_run_with_the_newest_checkpoint_whatever_its_name(run_dir: Path) -> None:
    named_last = Path(shutil.copytree(run_dir, run_dir.parent / "run_test"))
    dated = run_dir.rename(run_dir.parent / "run_2026-01-01_00-00-00_seed_0")
    named = Path(shutil.copytree(dated, run_dir.parent / "first"))
    for run, written in ((named_last, 1e9), (named, 3e9), (dated, 2e9)):
        for path in run.rglob("*"):
            os.utime(path, (written, written))
    assert find_checkpoint("latest", run_dir.parent / "new") == named / TRAINING_STATE / "checkpoint-3"
    shutil.rmtree(named)
    assert find_checkpoint("latest", run_dir.parent / "new") == dated / TRAINING_STATE / "checkpoint-3"


def test_resuming_a_two_process_checkpoint_with_one_warns_of_inexactness(run_dir, caplog) -> None:
    checkpoint = run_dir / TRAINING_STATE / "checkpoint-3"
    run_of(run_dir, "resume=latest")
    assert "not bitwise" not in caplog.text
    save_probe_states({"simple": SimpleEntropyProbe().init()}, checkpoint, num_processes=2)
    shutil.copy(checkpoint / "rng_state.pth", checkpoint / "rng_state_1.pth")
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    run_of(run_dir, "resume=latest")
    assert "checkpoint-3: the number of processes changes from 2 to 1: random numbers differ" in caplog.text


@pytest.mark.parametrize(
    ("probe", "part"),
    [(SimpleEntropyProbe(), "level"), (GradientNoiseScaleProbe(), "moments")],
)
def test_a_probe_state_of_another_shape_is_named_with_the_fix(run_dir: Path, probe: Probe, part: str) -> None:
    checkpoint = run_dir / TRAINING_STATE / "checkpoint-3"
    with safe_open(checkpoint / PROBE_STATES, framework="pt") as file:
        about, state = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    twice = {name: torch.stack([t, t], dim=-1) if f"/{part}" in name else t for name, t in state.items()}
    save_file(twice, checkpoint / PROBE_STATES, about)
    with pytest.raises(ValueError, match=rf"probes\.safetensors: .*'{probe.name}' .*{part}.* shape"):
        load_probe_states({probe.name: probe.init()}, checkpoint)


def test_a_checkpoint_needs_the_random_states_of_every_process(run_dir: Path) -> None:
    checkpoint = run_dir / TRAINING_STATE / "checkpoint-3"
    save_probe_states({}, checkpoint, num_processes=2)
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    assert find_flaw(checkpoint) == "rng_state_1.pth is missing or damaged"
    shutil.copy(checkpoint / "rng_state_0.pth", checkpoint / "rng_state_1.pth")
    assert find_flaw(checkpoint) == ""


def test_resuming_from_an_earlier_step_sets_later_checkpoints_aside(run_dir: Path) -> None:
    earlier = run_dir / TRAINING_STATE / "checkpoint-1"
    for _ in range(2):  # also if some with the same names are there already
        set_aside_later(run_dir, steps_taken(earlier))
        assert find_checkpoint("latest", run_dir) == earlier
        aside = run_dir / TRAINING_STATE / "set_aside"
        assert sorted(path.name for path in aside.iterdir()) == ["checkpoint-2", "checkpoint-3"]
        shutil.copytree(aside / "checkpoint-2", run_dir / TRAINING_STATE / "checkpoint-2")


def test_a_finished_run_takes_no_further_step_until_max_steps_is_raised(run_dir, caplog) -> None:
    for max_steps in (3, 5):
        run = run_of(run_dir, "resume=latest", f"trainer.max_steps={max_steps}")
        run.train()
        run.end()
        assert [row["step"] for row in read_metrics(run_dir / "logs")] == [*range(1, max_steps + 1)]
        forward = [row["step"] for row in read_estimates(run_dir / "logs") if row["name"] == "delta_h/forward"]
        assert forward == [*range(1, max_steps + 1)]
        assert caplog.text.count("has taken its 3 steps: raise trainer.max_steps to train longer") == 1


def test_resume_auto_starts_a_run_and_later_continues_it(trained: Path, tmp_path: Path) -> None:
    """resume=auto starts a run, starts over without a complete checkpoint, and resumes the newest complete one.

    Each ends like `trained`.
    """
    folder = tmp_path / "run"
    starts: list[int] = []
    for kept in ("nothing is there", [], [1]):
        if folder.exists():  # imitate a kill: leave the next checkpoint half-written
            last = max(kept, default=0) + 1
            for path in sorted((folder / TRAINING_STATE).glob("checkpoint-*")):
                if int(path.name[11:]) > last:
                    shutil.rmtree(path)
            (folder / TRAINING_STATE / f"checkpoint-{last}" / "trainer_state.json").unlink()
        run = run_of(folder, "resume=auto")
        starts.append(steps_taken(run.checkpoint) if run.checkpoint else 0)
        run.train()
        run.end()
        a, b = (p / TRAINING_STATE / "checkpoint-3" / "model.safetensors" for p in (folder, trained))
        assert a.read_bytes() == b.read_bytes()
        assert [row["step"] for row in read_metrics(folder / "logs")] == [1, 2, 3]
    assert starts == [0, 0, 1]
    run = run_of(folder, "resume=auto")
    run.train()  # it has already taken all its steps
    run.end()
    with pytest.raises(ValueError, match=r"^resume: .*seed=3 \(was 0\)"):
        run_of(folder, "resume=auto", "seed=3")
    with pytest.raises(ValueError, match="additional_steps"):
        run_of(folder, "resume=auto", "additional_steps=1")


@pytest.mark.parametrize("left", ["", "\0", "seed: [0"])
def test_resume_auto_starts_anew_where_a_crash_left_a_config_without_settings(tmp_path: Path, caplog, left) -> None:
    """Nothing is lost: the file is kept under another name. A readable one, or one beside records, is never moved."""
    (tmp_path / "config.yaml").write_text(left)
    start = open_run_folder(composed("train", f"run_dir={tmp_path}", "resume=auto"))
    start.run_folder.release()
    assert (start.checkpoint, start.is_resumed) == (None, False)
    assert (tmp_path / "config.yaml.damaged").read_text() == left
    assert "was not written completely" in caplog.text
    for name, text in (("config.yaml", "mine: true"), ("logs/metrics.jsonl", '{"step": 1}\n')):
        (tmp_path / "config.yaml").write_text(left)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        before = (tmp_path / "config.yaml").read_text()
        with pytest.raises(ValueError, match=f"resume: {tmp_path} |{tmp_path / 'config.yaml'} "):
            open_run_folder(composed("train", f"run_dir={tmp_path}", "resume=auto"))
        assert (tmp_path / "config.yaml").read_text() == before


def test_a_run_killed_before_its_first_checkpoint_is_told_how_to_start_again_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "my run" / TRAINING_STATE).mkdir(parents=True)
    fix = re.escape(f"or start it from its first step with 'run_dir=\"{tmp_path}/my run\"' resume=auto")
    with pytest.raises(UserError, match=fix):
        quick_run(tmp_path / "my run", "resume=latest")


def test_resume_auto_refuses_a_folder_named_by_the_time() -> None:
    with pytest.raises(ValueError, match=r"^resume=auto .*run_dir=PATH"):
        check_resume(composed("train", "resume=auto"))


def test_additional_steps_are_added_to_those_of_the_checkpoint(run_dir: Path) -> None:
    run = run_of(run_dir, "resume=latest", "additional_steps=1")
    run.train()
    run.end()
    assert [row["step"] for row in read_metrics(run_dir / "logs")] == [1, 2, 3, 4]
    config = OmegaConf.load(run_dir / "config.yaml")
    assert (config.trainer.max_steps, config.additional_steps) == (4, None)
    with pytest.raises(ValueError, match=r"additional_steps.*resume=latest"):
        run_of(run_dir.parent / "new", "additional_steps=1")


def test_the_config_records_the_command_of_the_latest_resume(run_dir, monkeypatch) -> None:
    """Also a command that looks like an OmegaConf interpolation, and resuming twice."""
    for command in ("run_dir=${now:%H}", "seed=0"):
        monkeypatch.setattr(sys, "argv", ["train.py", command])
        run_of(run_dir, "resume=latest")
        told = OmegaConf.load(run_dir / "config.yaml").provenance
        assert shlex.split(told.command) == ["train.py", command]
        assert told.version == VERSION


# --- a full disk --------------------------------------------------------------------------------------------------


def test_a_full_disk_is_named_with_the_file_and_the_fix(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    fix = r"metrics\.jsonl .*\(No space left on device\)"
    with pytest.raises(UserError, match=fix):
        Records(tmp_path).write_metrics(1, {"loss": 0.5})


def test_a_disk_that_fills_up_within_a_line_corrupts_nothing(tmp_path: Path) -> None:
    records = Records(tmp_path)
    estimates = {f"a/{i}": Estimate(float(i), 0.5, 8) for i in range(9)}
    records.write_estimates(1, 1, "probe", estimates)
    size = (tmp_path / PROBES_FILE).stat().st_size
    with files_of_at_most(size + 200), pytest.raises(UserError, match=PROBES_FILE):
        records.write_estimates(2, 1, "probe", estimates)
    assert (tmp_path / PROBES_FILE).stat().st_size == size
    assert [row["step"] for row in read_estimates(tmp_path)] == [1] * 9
    again = Records(tmp_path)
    again.start(after_step=1)
    again.write_estimates(2, 1, "probe", estimates)
    assert [row["step"] for row in read_estimates(tmp_path)] == [1] * 9 + [2] * 9


def test_a_full_disk_during_a_checkpoint_is_reported_and_the_previous_one_resumes(run_dir: Path) -> None:
    """It fills up in the weights, of 420 kB, or in the optimizer's state, which is twice as large."""
    way_out = r"checkpoint-4 .* MB "
    for size in (50_000, 600_000):
        run = run_of(run_dir, "resume=latest", "trainer.max_steps=4")
        with files_of_at_most(size), pytest.raises(UserError, match=way_out):
            run.train()
        run.end()
        assert find_checkpoint("latest", run_dir).name == "checkpoint-3"
    run = run_of(run_dir, "resume=latest", "trainer.max_steps=4")
    run.train()
    run.end()
    assert [row["step"] for row in read_metrics(run_dir / "logs")] == [1, 2, 3, 4]
    assert find_flaw(run_dir / TRAINING_STATE / "checkpoint-4") == ""


def test_a_full_disk_when_resuming_keeps_the_records(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for step in range(1, 99):
        records.write_metrics(step, {"loss": 0.1})
    before = read_metrics(tmp_path)
    with files_of_at_most(1000), pytest.raises(UserError, match=METRICS_FILE):
        records.start(after_step=90)
    assert read_metrics(tmp_path) == before

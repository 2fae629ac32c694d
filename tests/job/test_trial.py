"""rl-training try: what the intervals hold, what is said of them, and that a trial goes on after whatever ended it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from configs import QUICK, composed, composing
from hydra import compose

from rl_training.job.shipped import CONF
from rl_training.job.trial import Branch, Trial, read_trial, run_wave
from rl_training.job.trial_results import (
    Candidate,
    candidates,
    foretold,
    paired,
    scatter_over_seeds,
    to_stop,
    values_of,
    verdict,
)
from rl_training.mathematics.estimate import Estimate
from rl_training.records.folder import CONFIG_FILE

SMALL = [
    *QUICK, "trainer.max_steps=2", "batch.sequences_per_step=16", "trainer.max_completion_length=8", "probe=none",
]  # fmt: skip
TRIAL = ["steps=2", "seeds=1", "evaluation.fraction=0.02", "evaluation.responses_per_prompt=2"]


def equal_arms(
    arms: int, seeds: int, prompts: int, spread: tuple[float, float, float], rng: np.random.Generator
) -> np.ndarray:
    """Returns values (arms, seeds, prompts) of equal arms, with a part of each seed's, each prompt's, each cell's own.

    What all arms share at a seed and at a prompt is added, and large.
    """
    by_seed, by_prompt, cell = spread
    shared = rng.normal(0, 1, (1, seeds, 1)) + rng.normal(0, 1, (1, 1, prompts))
    own = rng.normal(0, by_seed, (arms, seeds, 1)) + rng.normal(0, by_prompt, (arms, 1, prompts))
    return shared + own + rng.normal(0, cell, (arms, seeds, prompts))


@pytest.mark.parametrize("spread", [(0.0, 0.0, 0.3), (0.05, 0.0, 0.3), (0.02, 0.1, 0.2), (0.0, 0.2, 0.05)])
@pytest.mark.parametrize("shape", [(2, 2, 16), (3, 3, 64), (6, 3, 32)])
def test_intervals_of_equal_arms_hold_zero(shape: tuple[int, int, int], spread: tuple[float, float, float]) -> None:
    rng, ends = np.random.default_rng(0), []
    for _ in range(1000):
        values = equal_arms(*shape, spread, rng)
        ends.append(paired(values[1] - values[0], scatter_over_seeds(values.mean(axis=2))).ends())
    assert 0.935 <= np.mean([low <= 0 <= high for low, high in ends]) <= 1.0


def test_two_seeds_and_two_prompts_by_hand() -> None:
    """Differences of two arms are 1 and 3 at two seeds: σ² = 1, stderr² = 2/2, Student's t of one degree is 12.706.

    A third arm that is equal to plain brings a degree, and σ² = ((1/3)² 2 · 2 + (2/3)² 2) / 2 = 2/3.
    """
    values = np.array([[[0.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [3.0, 3.0]]])
    found = paired(values[1] - values[0], scatter_over_seeds(values.mean(axis=2)))
    assert (found.value, found.stderr) == (2.0, 1.0)
    assert found.ends() == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-3)
    assert scatter_over_seeds(np.array([[0.0, 0.0], [1.0, 3.0], [0.0, 0.0]])) == (pytest.approx(2 / 3), 2)
    assert paired(np.array([[1.0, 3.0]]), (0.0, 0)).reason == "one seed says nothing of other seeds"


def of(name: str, value: float, reach: float, stopped: str = "") -> Candidate:
    interval = (value - reach, value + reach)
    difference = Estimate(value, reach / 2, 9, detail={"freedom": 8.0}, interval=interval)
    quantities = ("pass@1", "pass@8", "reward")
    return Candidate(name, 40, dict.fromkeys(quantities, 0.5), dict.fromkeys(quantities, difference), 3, stopped)


def test_the_verdict_takes_what_is_better_by_more_than_noise_and_orders_only_what_is_told_apart() -> None:
    sentence, best = verdict([of("psr", 0.4, 0.1), of("bonus", 0.35, 0.1), of("nsr", 0.01, 0.1)])
    assert best is not None
    assert best.name == "psr"
    assert sentence == (
        "Take psr: after 40 steps pass@8 +0.400 ± 0.100, pass@1 +0.400 ± 0.100, reward +0.400 ± 0.100. "
        "Not told apart from bonus."
    )
    assert "Not told apart" not in verdict([of("psr", 0.4, 0.1), of("bonus", 0.15, 0.1)])[0]
    sentence, best = verdict(
        [of("psr", 0.05, 0.1), of("bonus", -0.4, 0.1), of("lr", 0.9, 0.1, stopped="after 20 steps")]
    )
    assert best is None
    assert sentence.startswith("None is better than plain by more than noise in pass@8. The nearest is psr, +0.050")
    sentence, best = verdict([of("psr", 0.09, 0.1), of("bonus", 0.0, 0.1)])  # t = 1.8 with 8 degrees
    assert sentence.startswith(
        "Lean to psr: after 40 steps pass@8 +0.090 ± 0.100, better than plain with a chance of 0.95. None is"
    )
    assert best is not None


def test_halving_stops_those_of_the_worse_half_that_are_behind_and_says_why() -> None:
    (stopped,) = to_stop([of("psr", 0.1, 0.3), of("bonus", -0.2, 0.3), of("lr", 0.0, 0.3)])  # t = 2 with 8 degrees
    assert (stopped.name, stopped.stopped) == ("bonus", "after 40 steps: pass@8 -0.200 ± 0.300, place 3 of 3")
    assert not to_stop([of("psr", 0.1, 0.3), of("bonus", -0.05, 0.3), of("lr", 0.0, 0.3)])  # t = 1: not told


def test_values_are_those_of_each_prompts_responses(tmp_path: Path) -> None:
    """Row 5: one of two right, pass@1 = .5, pass@2 = 1. The greedy response does not count."""
    (tmp_path / "step_3").mkdir()
    numbers = [
        (5, 0, 1.0, 4, 0.2),
        (5, 1, 0.0, 6, 0.4),
        (5, "greedy", 1.0, 9, 9.0),
        (7, 0, 0.0, 1, 0.0),
        (7, 1, 0.0, 1, 0.0),
    ]
    keys = ("row", "response_number", "reward", "length", "mean_entropy")
    lines = [json.dumps(dict(zip(keys, row, strict=True))) for row in numbers]
    (tmp_path / "step_3" / "responses.jsonl").write_text("\n".join(lines))
    found = values_of(tmp_path, 3)
    expected = {
        "reward": [0.5, 0.0],
        "pass@1": [0.5, 0.0],
        "pass@2": [1.0, 0.0],
        "entropy": [0.3, 0.0],
        "length": [5, 1],
    }
    assert found.to_dict("list") == {name: pytest.approx(values) for name, values in expected.items()}
    assert list(found.index) == [5, 7]
    (against,) = candidates({"psr": {1: found, 2: found, 3: found}, "plain": {1: found, 2: found}}, 3, 1)
    assert (against.means["pass@1"], against.differences["pass@1"].value, against.seeds) == (0.25, 0.0, 2)


# --- branches ---------------------------------------------------------------------------------------------------------


def run_it(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rl_training", *words], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trial") / "run"
    ended = run_it("train", *SMALL, f"run_dir={folder}")
    assert ended.returncode == 0, ended.stderr
    return folder


def a_run_folder(folder: Path) -> Path:
    """Returns a folder that looks like a run with a checkpoint, where nothing is trained."""
    (folder / "training_state" / "checkpoint-2").mkdir(parents=True)
    (folder / "training_state" / "checkpoint-2" / "trainer_state.json").write_text('{"global_step": 2}')
    (folder / CONFIG_FILE).write_text("seed: 0\ntrainer: {lr_scheduler_type: constant}\n")
    return folder


def test_candidates_are_halved_until_two_are_left_and_not_where_the_schedule_knows_its_end(tmp_path: Path) -> None:
    run = a_run_folder(tmp_path)

    def stages(num: int, **cfg: object) -> list[int]:
        names = tuple(f"c{number}" for number in range(num))
        known = composed("try", f"run={run}", *(f"{key}={value}" for key, value in cfg.items()))
        return Trial(run / "training_state" / "checkpoint-2", names, known, (), ()).stages

    assert [stages(num) for num in (1, 2, 3, 4, 8)] == [[40], [40], [20, 40], [20, 40], [10, 20, 40]]
    assert stages(8, halving="false") == [40]
    (run / CONFIG_FILE).write_text("seed: 0\ntrainer: {lr_scheduler_type: linear}\n")
    assert stages(8) == [40]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("[pssr]", "unknown intervention 'pssr': did you mean psr"),
        ("[lr:0.5,bonus:0]", "bonus:0: the strength must lie above 0"),
        ("[nsr]", "nsr and psr contradict each other"),
    ],
)
def test_what_no_branch_could_be_trained_with_is_refused_before_any_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, said: str
) -> None:
    run = a_run_folder(tmp_path)
    with pytest.raises(ValueError, match=r"no complete checkpoint in .*; give run=PATH$"):
        read_trial(composed("try", f"run={run}", f"interventions={names}"), (), ())
    checkpoint = run / "training_state" / "checkpoint-2"
    monkeypatch.setattr("rl_training.job.trial.checkpoint_in_a_run", lambda setting, value: checkpoint)
    (run / CONFIG_FILE).write_text("seed: 0\nintervention: psr\ntrainer: {}\n")
    with pytest.raises(ValueError, match=said):
        read_trial(composed("try", f"run={run}", f"interventions={names}"), (), ())
    with composing(), pytest.raises(ValueError, match="stesp: there is no such setting, nor does the run in"):
        read_trial(compose("try", [f"run={run}", "interventions=[lr:0.5]"]), ["stesp=20"], ())


def test_what_was_foretold_is_of_this_strength_or_says_of_which(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "intervention/bonus/delta_h": 9.0, "intervention/lr:0.5/delta_h": 2e-3},
        {"step": 11, "intervention/bonus/delta_h": 1e-3, "intervention/lr:0.5/mean_delta_h": 7.0},
        {"step": 12, "reward": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert foretold(tmp_path, "bonus") == "+0.001 nats per token by one step"
    assert foretold(tmp_path, "lr:0.5") == "+0.002 nats per token by one step"
    assert foretold(tmp_path, "bonus:0.03") == "+0.001 nats per token by one step, of bonus"
    assert foretold(tmp_path, "psr") == ""


def test_a_branch_whose_command_fails_does_not_hold_up_the_others(tmp_path, monkeypatch) -> None:
    """Two at once, by joblib; the commands are quick ones."""
    run = a_run_folder(tmp_path / "run")
    cfg = composed("try", f"run={run}", f"launch='{sys.executable} -m'")  # by which no GPU is looked for
    launcher = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    trial = Trial(run / "training_state" / "checkpoint-2", ("psr",), cfg, (), launcher)
    commands = {"plain": [["no_such"], ["config"]], "psr": [["--version"], ["config"]]}
    monkeypatch.setattr(Branch, "commands", lambda branch: commands[branch.name])
    branches = [Branch(trial, name, 1, 2) for name in commands]
    trial.folder.mkdir(parents=True)
    run_wave(trial, branches)
    assert "error: there is no command no_such" in Path(f"{branches[0].folder}.log").read_text()
    assert "conf" not in branches[0].reason()
    assert branches[1].reason() == str(CONF)


@pytest.mark.slow
def test_a_trial_that_is_killed_goes_on_to_the_same_table(run: Path, tmp_path: Path) -> None:
    """SIGKILL of the command, then of one branch; a function of the user's own that fails is named."""
    (tmp_path / "own.py").write_text("def fails(loss, strength):\n    raise KeyError('x')\n")
    words = ["try", str(run), f"interventions=[lr:0.5,{tmp_path}/own.py:fails]", *TRIAL, "jobs=2"]
    whole = run_it(*words, f"output={tmp_path / 'whole'}")
    assert whole.returncode == 1, whole.stderr
    assert "KeyError" in whole.stdout
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "rl_training", *words, f"output={killed}"]
    for victim in ("itself", "a branch"):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not list(killed.glob("*/seed_*/config.yaml")) and time.monotonic() < deadline:
            time.sleep(0.05)
        if victim == "itself":
            process.kill()
        else:
            branches = subprocess.run(["pgrep", "-f", f"run_dir={killed}"], capture_output=True, text=True, check=False)
            for pid in branches.stdout.split()[:1]:
                os.kill(int(pid), signal.SIGKILL)
        process.wait()
    again = run_it(*words, f"output={killed}")
    table = [line for line in again.stdout.splitlines() if line.startswith("lr:0.5")]
    assert table == [line for line in whole.stdout.splitlines() if line.startswith("lr:0.5")]
    assert len(table) == 1


@pytest.mark.slow
def test_submitits_local_executor_gives_the_table_of_the_basic_launcher(run: Path, tmp_path: Path) -> None:
    words = ["try", str(run), "interventions=[lr:0.5]", *TRIAL]
    tables = []
    for launcher in ("basic", "submitit_local"):
        ended = run_it(*words, f"launcher={launcher}", f"output={tmp_path / launcher}")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        tables.append([line for line in ended.stdout.splitlines() if line.startswith("lr:0.5")])
    assert tables[0] == tables[1]
    assert (tmp_path / "submitit_local" / "try.html").is_file()

"""The alert of a run: at the step at which the records' straight line says so, in log and dashboards, and as an end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_training.hosts.trl import alert
from rl_training.job.build import TrainingRun, build_run
from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.present_rate import down_to, is_below_within, present_rate
from rl_training.records.report.series import read_run

WITHIN, LEVEL = 5, 9.0  # entropy is far below this level from the beginning
SMALL = [
    "trainer.max_steps=5", "trainer.num_generations=2", "batch.sequences_per_step=16", "batch.microbatch_size=2",
    "trainer.max_completion_length=8", "++trainer.disable_tqdm=true",
]  # fmt: skip


def run_of(folder: Path, *overrides: str) -> TrainingRun:
    with initialize_config_dir(str(Path(__file__).parents[1] / "conf"), version_base="1.3"):
        return build_run(compose("train", overrides=[*SMALL, f"run_dir={folder}", *overrides]))


def test_it_comes_when_the_records_straight_line_says_so_and_ends_the_run_if_asked_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert, "MEASURED_STEPS", 3)
    run = run_of(tmp_path / "run", f"alert.within_steps={WITHIN}", f"alert.below={LEVEL}", "alert.stop=true")
    run.train()
    for dashboard in run.loggers:
        dashboard.finish([])
    run.end()  # as one that is done, not as one that a signal ended
    records = read_run(run.run_dir)
    forward, entropy = records.measured("delta_h/forward"), records.measured("entropy/token")
    below = [
        step
        for step in list(forward)[2:]
        if is_below_within(
            WITHIN, down_to(LEVEL, entropy[step]), present_rate([forward[s] for s in range(step - 2, step + 1)])
        )
    ]
    last = run.trainer.state.global_step
    assert below == [last] == [3]
    assert (run.run_dir / "training_state" / f"checkpoint-{last}").is_dir()
    told = [line for line in caplog.messages if "entropy is falling" in line]
    assert len(told) == 1
    assert f"step {last}: token entropy is {entropy[last].value:.3g} nats" in told[0]
    assert "in a straight line" in told[0]
    assert "No forecast" in told[0]
    assert "alert.stop ends the run by this line" in told[0]
    assert "95 %" not in told[0]
    events = EventAccumulator(str(run.run_dir / "logs" / "tensorboard"))
    events.Reload()
    assert "alert: entropy is falling/text_summary" in events.Tags()["tensors"]


def told_at(within_steps: int, measured: dict[int, int], **settings: Any) -> list[int]:
    """Returns the steps at which it speaks of a run whose entropy, 1 nat, falls by 0.1 in each step.

    measured  step → the step that the probe's last answer is about, which it then still holds
    """
    attachment, told = SimpleNamespace(probes=[SimpleNamespace(name="simple")], latest={}), []
    listener = alert.EntropyAlert(attachment, within_steps, tell=lambda *_: told.append(step), **settings)
    for step, about in measured.items():
        forward = Estimate(-0.1, 0.001, 8, about_step=about)
        attachment.latest = {"delta_h/forward": forward, "entropy/token": Estimate(1.0, 0.001, 8)}
        listener.on_step_end(None, SimpleNamespace(global_step=step, is_world_process_zero=True), None)
    return told


def test_a_prediction_counts_once_however_long_it_is_the_last() -> None:
    """Every second step is measured: ten predictions are there at step 20, and not when ten steps have passed."""
    assert told_at(100, {step: step - step % 2 for step in range(2, 25)}) == [20]


def test_after_an_alert_as_many_steps_are_quiet_as_it_looks_ahead() -> None:
    assert told_at(7, {step: step for step in range(1, 30)}) == [10, 17, 24]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["alert.within_steps=0"], "alert.within_steps=0 must be a whole number, at least 1"),
        (["alert.below=0.1"], "give alert.within_steps=100"),
        (["alert.within_steps=5", "alert.below=-1"], "alert.below=-1 must be a number above 0"),
        (["alert.within_steps=5", "alert.stop=1"], "must be true or false"),
        (["alert.within_steps=5", "probe=none"], "add probe=simple"),
    ],
)
def test_an_alert_that_cannot_be_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_of(tmp_path / "run", *overrides)

"""Claims on the progress bar: all its numbers fit into 80 columns, and its entropy is the report's."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from configs import quick_run
from transformers import trainer_callback

from rl_training.errors import UserError
from rl_training.job.run import progress
from rl_training.job.run.progress import StepProgress


def test_the_progress_bar_with_the_entropy_fits_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, tqdm = io.StringIO(), trainer_callback.tqdm
    monkeypatch.setattr(trainer_callback, "tqdm", lambda total, **_: tqdm(total=total, file=screen, ncols=80))
    state = SimpleNamespace(max_steps=1000, global_step=0, is_world_process_zero=True)
    bar = StepProgress()
    bar.on_train_begin(None, state, None)
    state.global_step = 640
    bar.on_step_end(None, state, None)
    logs = {"reward": 0.8551, "entropy": 0.0451, "entropy/token": 0.0421}
    logs |= {"delta_h/forward": -0.01234, "delta_h/forward_se": 0.0021}
    bar.on_log(None, state, None, logs=logs)
    bar.on_train_end(None, state, None)
    last = screen.getvalue().split("\r")[-1].rstrip()
    assert len(last) <= 80
    for shown in ("64%|", "640/1000", "reward=0.855", "entropy=0.042", "δH=-0.0123±0.0041"):  # 95 %
        assert shown in last
    assert "|#" in last


def test_a_long_step_shows_its_progress_from_the_first_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a step of half a minute the bar is drawn before and after it, and at most every ten seconds in between."""
    screen, tqdm, clock = io.StringIO(), trainer_callback.tqdm, SimpleNamespace(now=0.0)
    monkeypatch.setattr(trainer_callback, "tqdm", lambda total, **_: tqdm(total=total, file=screen, ncols=80))
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    state = SimpleNamespace(max_steps=16, global_step=0, is_world_process_zero=True)
    args = SimpleNamespace(gradient_accumulation_steps=8)
    bar = StepProgress()
    bar.on_train_begin(args, state, None)
    assert "0/16 [00:00<?, sampling]" in screen.getvalue()
    bar.on_step_begin(args, state, None)
    for _ in range(7):
        clock.now += 4.0
        bar.on_substep_end(args, state, None)
    assert re.findall(r"0/16( \+\d/8) \[00:00<\?\]", screen.getvalue()) == [" +3/8", " +6/8"]
    state.global_step = 1
    bar.on_step_end(args, state, None)
    bar.on_train_end(args, state, None)
    last = screen.getvalue().split("\r")[-1]
    assert "1/16 [" in last
    assert "sampling" not in last


def test_log_messages_have_their_own_line_above_the_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    state = SimpleNamespace(max_steps=9, global_step=3, is_world_process_zero=True)
    bar = StepProgress()
    bar.on_train_begin(None, state, None)
    logging.getLogger("rl_training.any").warning("not measured: one, two")
    bar.on_train_end(None, state, None)
    (line,) = [line for line in capsys.readouterr().err.split("\n") if "not measured" in line]
    assert line.split("\r")[-1] == "not measured: one, two"


def test_the_line_of_an_error_begins_below_the_progress_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trainer.max_steps=1", "probe=none", "++trainer.loss_type=unknown", "++trainer.disable_tqdm=false"]
    run = quick_run(tmp_path / "run", *words)
    with pytest.raises(UserError, match="Unknown loss type"):
        run.train()
    shown = capsys.readouterr().err
    assert "0/1" in shown
    assert shown.endswith("\n")

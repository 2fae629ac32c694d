"""A run that is asked to end does so after a whole rollout, and on every process at the same step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rl_training.job.errors import SIGNALS
from rl_training.job.run import stopping
from rl_training.job.run.stopping import StopAtStepEnd

SIGINT, SIGTERM = 2, 15


def ends_after(stop: StopAtStepEnd, step: int, steps_per_rollout: int = 1) -> bool:
    """Return whether the run ends after this step. A rollout is one microbatch with `steps_per_rollout` iterations."""
    args = SimpleNamespace(steps_per_generation=1, num_iterations=steps_per_rollout, gradient_accumulation_steps=1)
    control = SimpleNamespace(should_training_stop=False, should_save=False, should_evaluate=True)
    stop.on_step_end(args, SimpleNamespace(global_step=step), control)
    assert control.should_training_stop == control.should_save == (not control.should_evaluate)
    return control.should_training_stop


def test_training_stops_at_the_first_step_that_uses_up_a_rollout() -> None:
    """Three steps train on each rollout. Step 6 is the last for its rollout, so training can resume exactly there."""
    stop = StopAtStepEnd()
    assert not ends_after(stop, 3, steps_per_rollout=3)
    stop.request.on_signal(SIGTERM, None)
    assert [ends_after(stop, step, steps_per_rollout=3) for step in (4, 5, 6)] == [False, False, True]
    assert stop.signum == SIGTERM


@pytest.mark.parametrize("of_the_others", [(SIGINT, 0), (0, SIGINT)], ids=str)
def test_a_process_without_a_signal_stops_with_the_one_that_got_it(
    of_the_others: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "gather", lambda flags: torch.cat([flags, torch.tensor(of_the_others)]))
    stop = StopAtStepEnd()
    assert ends_after(stop, 1)
    assert stop.signum == SIGINT


def test_without_a_signal_no_process_stops() -> None:
    assert not ends_after(StopAtStepEnd(), 1)
    assert {SIGINT, SIGTERM} <= {int(signum) for signum in SIGNALS}

"""When a run that was asked to end does so: after a whole rollout, and on every process at the same step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_training.job.command_line import SIGNALS
from rl_training.job.stopping import StopAtStepEnd

SIGINT, SIGTERM = 2, 15


def trainer_of(steps_per_rollout: int = 1, of_the_others: tuple[int, ...] = ()) -> Any:
    """A stand-in: microbatches of its rollouts are one a step; `of_the_others` is what other processes were asked."""

    def gather(own: torch.Tensor) -> torch.Tensor:
        return torch.cat([own, torch.tensor(of_the_others, dtype=own.dtype)])

    accelerator = SimpleNamespace(
        num_processes=1 + len(of_the_others), is_main_process=False, device="cpu", gather=gather
    )
    args = SimpleNamespace(steps_per_generation=steps_per_rollout, gradient_accumulation_steps=1)
    return SimpleNamespace(accelerator=accelerator, args=args, num_iterations=1)


def ends_after(stop: StopAtStepEnd, step: int) -> bool:
    control = SimpleNamespace(should_training_stop=False, should_save=False, should_evaluate=True)
    stop.on_step_end(None, SimpleNamespace(global_step=step), control)
    assert control.should_training_stop == control.should_save == (not control.should_evaluate)
    return control.should_training_stop


def test_it_ends_at_the_first_step_end_at_which_a_rollout_is_used_up() -> None:
    """Three steps learn from a rollout: of steps 4, 5, 6 the last uses it up, and there training can go on exactly."""
    stop = StopAtStepEnd(trainer_of(steps_per_rollout=3))
    assert not ends_after(stop, 3)
    stop._take(SIGTERM, None)
    assert [ends_after(stop, step) for step in (4, 5, 6)] == [False, False, True]
    assert stop.signum == SIGTERM


@pytest.mark.parametrize("of_the_others", [(SIGINT, 0), (0, SIGINT)], ids=str)
def test_a_process_that_was_asked_nothing_ends_with_the_one_that_was(of_the_others: tuple[int, ...]) -> None:
    stop = StopAtStepEnd(trainer_of(of_the_others=of_the_others))
    assert ends_after(stop, 1)
    assert stop.signum == SIGINT


def test_nobody_asked_nobody_ends() -> None:
    assert not ends_after(StopAtStepEnd(trainer_of(of_the_others=(0, 0))), 1)
    assert {SIGINT, SIGTERM} <= {int(signum) for signum in SIGNALS}

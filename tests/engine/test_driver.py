"""The driver takes the calls of a step in their order alone, and says which one is missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from plain_loop import microbatches

from rl_training.engine.driver import StepDriver
from rl_training.engine.loss_info import LossInfo
from rl_training.policy.scores import Scores
from rl_training.probes import SimpleEntropyProbe


def add_microbatch(driver: StepDriver) -> None:
    (part, *_) = microbatches(1)
    values = torch.zeros_like(part.completion_mask, dtype=torch.float32)
    driver.microbatch(part, Scores(values, values, part.completion_mask), LossInfo())


def refuse(message: str, call: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        call(*args)


def test_a_call_out_of_order_names_the_missing_one() -> None:
    driver = StepDriver([SimpleEntropyProbe()])
    refuse("call start(loop) before begin(number)", driver.begin, 1)
    measurer = SimpleNamespace(begin=lambda: None, fail_step=lambda: None)
    # as if a training had started
    driver._training = cast(Any, SimpleNamespace(measurer=measurer, fold_recorder=None))
    driver.begin(1)
    refuse("call plan(…) before microbatch(…)", add_microbatch, driver)
    refuse("call microbatch(…) before gradients_ready(…)", driver.gradients_ready, 1)
    driver.fail_step()
    refuse("call begin(number) before plan(…)", driver.plan)
    refuse("call begin(number) before microbatch(…)", add_microbatch, driver)
    refuse("call begin(number) before gradients_ready(…)", driver.gradients_ready, 1)


def test_a_step_that_no_probe_measures_needs_no_plan_and_takes_no_microbatch_once_its_gradients_are_ready() -> None:
    driver = StepDriver([])
    for number in (1, 2):
        driver.begin(number)
        if number == 2:
            driver.plan()
        assert driver.awaits_gradients
        add_microbatch(driver)
        refuse("call finish() and begin(number) before plan(…)", driver.plan)
        driver.gradients_ready(number)
        assert not driver.awaits_gradients
        for ended in (lambda: None, driver.stepped):
            ended()
            refuse("call finish() and begin(number) before microbatch(…)", add_microbatch, driver)
            refuse("call finish() and begin(number) before gradients_ready(…)", driver.gradients_ready, number)
        driver.stepped()  # TRL says so even of a step that was discarded
        assert len(driver.finish().rollouts) == 1
        driver.stepped()
        assert not driver.finish().rollouts

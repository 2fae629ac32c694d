"""The driver takes the calls of a step in their order alone, and says which one is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from plain_loop import loss_of, microbatches, scores_of
from shared_rollouts import MICROBATCH, G

from rl_training import measured_loop
from rl_training.engine.driver import StepDriver
from rl_training.engine.loss_info import LossInfo
from rl_training.engine.probe import Probe
from rl_training.hosts.plain.calls import MeasuredLoop
from rl_training.models.load import load_tiny
from rl_training.policy.scores import Scores
from rl_training.probes import SimpleEntropyProbe


def add_microbatch(driver: StepDriver) -> None:
    (part, *_) = microbatches(1)
    values = torch.zeros_like(part.completion_mask, dtype=torch.float32)
    driver.microbatch(part, Scores(values, values, part.completion_mask), LossInfo())


CALLS: dict[str, Callable[[StepDriver], Any]] = {
    "begin": lambda driver: driver.begin(1),
    "plan": StepDriver.plan,
    "microbatch": add_microbatch,
    "ready": lambda driver: driver.gradients_ready(1),
    "stepped": StepDriver.stepped,
    "finish": StepDriver.finish,
    "skip": StepDriver.skip_step,
    "fail": StepDriver.fail_step,
    "close": StepDriver.close,
    "end of backward": StepDriver.finish_backward,
    "failed backward": StepDriver.drop_backward,
    "optimizer": StepDriver.about_to_step,
}
TAKEN = ["begin", "microbatch", "ready", "stepped"]


def make(driver: StepDriver, calls: list[str]) -> Any:
    """Make the calls, and return what the last one returns."""
    return [CALLS[call](driver) for call in calls][-1]


def refuse(message: str, call: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        call(*args)


@pytest.mark.parametrize(
    ("calls", "missing"),
    [
        (["plan"], "begin(number) before plan(…)"),
        (["microbatch"], "begin(number) before microbatch(…)"),
        (["ready"], "begin(number) before gradients_ready(…)"),
        (["stepped"], "begin(number) before stepped()"),
        (["skip"], "begin(number) before skip_step()"),
        (["finish"], "begin(number) before finish()"),
        (["begin", "begin"], "finish() before begin(number)"),
        (["begin", "microbatch", "begin"], "finish() before begin(number)"),
        (["begin", "microbatch", "ready", "begin"], "finish() before begin(number)"),
        ([*TAKEN, "begin"], "finish() before begin(number)"),
        (["begin", "microbatch", "plan"], "finish() and begin(number) before plan(…)"),
        (["begin", "microbatch", "ready", "microbatch"], "finish() and begin(number) before microbatch(…)"),
        (["begin", "microbatch", "ready", "ready"], "finish() and begin(number) before gradients_ready(…)"),
        (["begin", "stepped"], "gradients_ready(…) before stepped()"),
        (["begin", "microbatch", "stepped"], "gradients_ready(…) before stepped()"),
        (["begin", "finish"], "stepped() before finish()"),
        (["begin", "microbatch", "ready", "finish"], "stepped() before finish()"),
        ([*TAKEN, "stepped"], "finish() and begin(number) before stepped()"),
        ([*TAKEN, "skip"], "finish() and begin(number) before skip_step()"),
        ([*TAKEN, "microbatch"], "finish() and begin(number) before microbatch(…)"),
        ([*TAKEN, "finish", "finish"], "begin(number) before finish()"),
        ([*TAKEN, "finish", "stepped"], "begin(number) before stepped()"),
        (["begin", "skip", "microbatch"], "finish() and begin(number) before microbatch(…)"),
        (["begin", "fail", "stepped"], "begin(number) before stepped()"),
        (["begin", "close", "finish"], "begin(number) before finish()"),
    ],
)
def test_a_call_out_of_order_names_the_missing_one_and_discards_the_step(calls: list[str], missing: str) -> None:
    driver = StepDriver([])
    *legal, illegal = calls
    make(driver, legal) if legal else None
    refuse(f"call {missing}", CALLS[illegal], driver)
    assert not driver.has_step
    assert len(make(driver, [*TAKEN, "finish"]).rollouts) == 1  # the step may be taken again


@pytest.mark.parametrize(
    ("calls", "num_rollouts"),
    [
        (["begin", "ready", "stepped", "finish"], 0),
        (["begin", "plan", "plan", "microbatch", "microbatch", "ready", "stepped", "finish"], 2),
        (["begin", "skip", "finish"], 0),
        (["begin", "microbatch", "skip", "optimizer", "stepped", "finish"], 0),  # as TRL's callbacks say it
        (["begin", "microbatch", "ready", "skip", "finish"], 0),
        (["fail", "begin", "microbatch", "ready", "fail", *TAKEN, "fail", *TAKEN, "finish"], 1),
        (["optimizer", "end of backward", *TAKEN, "optimizer", "failed backward", "finish"], 1),
    ],
)
def test_steps_may_be_skipped_or_taken_again_after_a_failure(calls: list[str], num_rollouts: int) -> None:
    driver = StepDriver([])
    assert len(make(driver, calls).rollouts) == num_rollouts


def test_losses_are_those_of_the_microbatches_until_gradients_are_ready() -> None:
    driver = StepDriver([])
    awaiting = []
    for call in (*TAKEN, "finish"):
        CALLS[call](driver)
        awaiting.append(driver.awaits_gradients)
    assert awaiting == [True, True, False, False, False]


def loop_with(probes: Sequence[Probe], **settings: Any) -> tuple[Any, torch.optim.Optimizer, MeasuredLoop]:
    torch.manual_seed(0)
    model = load_tiny()[0].train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shape = {"responses_per_prompt": G, "microbatch_size": MICROBATCH, "microbatches": 1}
    return model, optimizer, measured_loop(model, optimizer, probes, **shape, **settings)


def test_a_measured_step_needs_a_start_its_plan_and_its_microbatches() -> None:
    *_, measured = loop_with([SimpleEntropyProbe()])
    driver = measured._driver
    refuse("call start(loop) before begin(number)", driver.begin, 1)
    with measured:
        driver.begin(1)
        refuse("call plan(…) before microbatch(…)", add_microbatch, driver)
        driver.begin(1)
        refuse("call microbatch(…) before gradients_ready(…)", driver.gradients_ready, 1)
    refuse("call start(loop) before begin(number)", driver.begin, 1)


def test_a_bounded_step_whose_calls_are_out_of_order_has_the_learning_rate_of_the_schedule_again() -> None:
    (part, *_) = microbatches(1)
    model, optimizer, measured = loop_with([], target_kl_share=2e-3)
    with measured:
        for illegal in ("finish", "begin", "plan", "microbatch", "ready"):
            with contextlib.suppress(InterruptedError), measured.step(1):
                logps, entropies = scores_of(model, part)
                measured.microbatch(part, logps, entropies.detach())
                loss_of(logps, part, 1).backward()
                measured.gradients_ready()
                assert optimizer.param_groups[0]["lr"] < 1e-3
                with pytest.raises(RuntimeError, match=r"^call "):
                    CALLS[illegal](measured._driver)
                assert optimizer.param_groups[0]["lr"] == 1e-2, illegal
                raise InterruptedError


def interrupt(measured: MeasuredLoop) -> None:
    raise InterruptedError


@pytest.mark.parametrize("end", [interrupt, MeasuredLoop.skip_step, lambda measured: measured._driver.skip_step()])
def test_a_step_that_is_not_taken_is_no_evidence_and_counts_no_comparison(end: Callable[[MeasuredLoop], None]) -> None:
    """Its responses may come again. Both groups have the same mean reward, as 20 steps would not have by chance.

    The step fails, or is left out, after its gradients are ready, again and again, and is then taken.
    """
    (part, *_) = microbatches(1)
    rewards = torch.arange(len(part.advantages)) % 2
    part = dataclasses.replace(part, rewards=rewards.float(), untested=False)
    model, optimizer, measured = loop_with([SimpleEntropyProbe(per_sequence=True)])
    with measured:
        before = measured._driver.states()["checks"]
        for is_taken in [False] * 20 + [True]:
            number = (measured._progress.last_step_number or 0) + 1
            with contextlib.suppress(InterruptedError), measured.step(number, rollout_number=1):
                logps, entropies = scores_of(model, part)
                measured.microbatch(part, logps, entropies.detach())
                loss_of(logps, part, 1).backward()
                measured.gradients_ready()
                optimizer.step() if is_taken else end(measured)
            optimizer.zero_grad()
            if not is_taken:
                assert measured._driver.states()["checks"] == before
    assert measured.latest["delta_reward/forward"].code != "relative_rewards"
    checks = measured.state_dict()["checks"]
    assert checks["count"] == 1
    assert checks["log_chance"] == pytest.approx(math.log(0.5) * (len(part.advantages) // G - 1))

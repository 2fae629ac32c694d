"""A probe consists of functions of a step and a state: which state is kept, and what a failed check discards."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import plain_loop
import pytest
import torch
from layouts import OPTIONS, model_of
from plain_loop import CLIP, Action, no_action
from shared_rollouts import MICROBATCH, G
from transformers.trainer_callback import CallbackHandler

from rl_training import Estimate, MeasuredStepProbe, Probe, Reading, SimpleEntropyProbe, UserError, measured_loop
from rl_training.engine.driver import StepDriver
from rl_training.engine.probe_states import ProbeStates
from rl_training.hosts.plain.calls import MeasuredLoop
from rl_training.parallel.state_tensors import to_tensors
from rl_training.step.needs import Need

MICROBATCHES = 4
train = functools.partial(plain_loop.train, count=MICROBATCHES)


class Counting(Probe):
    """Counts, in its state, the steps whose state was kept."""

    def __init__(self, name: str, needs: Need = Need.NOTHING) -> None:
        self.name, self.needs = name, needs
        super().__init__()
        self.during: list[Any] = []  # the driver's state after each step, before the step is verified
        self.driver: StepDriver | None = None

    def init(self) -> dict[str, int]:
        return {"steps": 0}

    def measure(self, ctx: Any, state: dict[str, int]) -> Reading:
        seen = {f"{self.name}/steps_before": Estimate(float(state["steps"]))}
        predicted = {f"{self.name}/prediction": Estimate(1.0)} if self.needs else {}
        return Reading(predicted, seen, {"steps": state["steps"] + 1})

    def after_step(self, ctx: Any, reading: Reading) -> Reading:
        assert self.driver is not None
        self.during.append(self.driver.states()[self.name]["steps"])
        return reading


def loop_with(*probes: Probe) -> tuple[Any, torch.optim.Optimizer, MeasuredLoop]:
    model = model_of(OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, eps=1e-5)
    measured = measured_loop(
        model, optimizer, probes, responses_per_prompt=G, microbatch_size=MICROBATCH,
        microbatches=MICROBATCHES, max_grad_norm=CLIP, dr_grpo=True,
    )  # fmt: skip
    for probe in probes:
        if isinstance(probe, Counting):
            probe.driver = measured._driver
    return model, optimizer, measured


def counted(before_optimizer: Action = no_action) -> tuple[list[dict[str, Estimate]], Counting, Counting]:
    """Return the estimates of three steps, a probe that predicts, and one that does not."""
    predicting, measuring = Counting("predicting", Need.ENTROPY_GRADIENT), Counting("measuring")
    model, optimizer, measured = loop_with(predicting, measuring)
    return train(model, optimizer, measured, before_optimizer=before_optimizer), predicting, measuring


def wrong_at(step: int) -> Action:
    """Return an action that doubles the learning rate of one step without the probes' knowledge."""
    numbers = itertools.count(1)

    def act(model: Any, optimizer: torch.optim.Optimizer) -> None:
        if next(numbers) == step:
            group = optimizer.param_groups[0]
            group["lr"] *= 2.0
            handle = optimizer.register_step_post_hook(
                lambda *_: (group.update(lr=group["lr"] / 2.0), handle.remove())[0]
            )

    return act


def test_the_state_of_a_prediction_is_committed_only_after_the_step_is_verified() -> None:
    answers, predicting, measuring = counted()
    for probe in (predicting, measuring):
        assert [step[f"{probe.name}/steps_before"].value for step in answers] == [0, 1, 2]
    assert predicting.during == [0, 1, 2]
    assert measuring.during == [1, 2, 3]  # measurements stay valid whatever the verification finds


def test_a_step_that_fails_verification_discards_predictions_and_their_state_alone() -> None:
    answers, *_ = counted(wrong_at(2))
    assert [math.isnan(step["predicting/prediction"].value) for step in answers] == [False, True, False]
    assert answers[1]["predicting/prediction"].code == "not_the_formula"
    assert [step["predicting/steps_before"].value for step in answers] == [0, 1, 1]
    assert [step["measuring/steps_before"].value for step in answers] == [0, 1, 2]


def test_two_probes_that_give_an_estimate_the_same_name_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Namesake(Counting):
        def measure(self, ctx: Any, state: dict[str, int]) -> Reading:
            return Reading(measured={"first/steps_before": Estimate(0.0)}, state=state)

    model, optimizer, measured = loop_with(Counting("first"), Namesake("second"))
    train(model, optimizer, measured)
    [warning] = [message for message in caplog.messages if "both measure" in message]
    assert warning.startswith("probes 'first' and 'second' both measure 'first/steps_before'")


def test_a_step_that_fails_verification_leaves_no_error_bar() -> None:
    """The third step's error is averaged with that of the first step only."""
    model, optimizer, measured = loop_with(SimpleEntropyProbe())
    answers = train(model, optimizer, measured, before_optimizer=wrong_at(2))
    first, third = (float(answers[i]["delta_h/forward"].detail["stderr_of_batch"]) for i in (0, 2))
    expected = math.sqrt((0.25 * first**2 + third**2) / 1.25)
    assert answers[2]["delta_h/forward"].stderr == pytest.approx(expected, rel=1e-6)


def test_a_training_that_fails_in_its_first_step_leaves_no_state_for_the_next() -> None:
    model, optimizer, measured = loop_with(SimpleEntropyProbe())

    def fail(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        raise RuntimeError("mistake")

    with pytest.raises(RuntimeError, match=r"^mistake$"):
        train(model, optimizer, measured, before_optimizer=fail)
    answers = train(model, optimizer, measured, steps=1)
    assert math.isfinite(answers[0]["delta_h/forward"].value)
    assert measured.state_dict()["simple"]


def test_a_probe_state_that_gains_keys_is_refused_since_a_resumed_run_would_lose_them() -> None:
    class Growing(Counting):
        def measure(self, ctx: Any, state: dict[str, int]) -> Reading:
            reading = super().measure(ctx, {"steps": 0})
            return dataclasses.replace(reading, state={**state, "more": 1})

    with pytest.raises(UserError, match=r"probe 'growing': .*state.* 'more'"):
        train(*loop_with(Growing("growing")))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("reward", 1.0, "'reward' .*plain/reward"),  # the trainer logs one
        ("plain/length", torch.tensor(1.0), "'plain/length' .*Tensor.*float"),
    ],
)
def test_an_estimate_is_a_number_under_a_name_that_no_trainer_uses(name: str, value: Any, says: str) -> None:
    class Plain(Probe):
        name = "plain"

        def __init__(self) -> None:  # without super().__init__()
            self.number = value

        def measure(self, ctx: Any, state: None) -> Reading:
            return Reading(measured={"plain/one": Estimate(1.0)} if ctx.step.number == 1 else {name: Estimate(value)})

    with pytest.raises(UserError, match=rf"^probe 'plain': measure .*{says}"):
        train(*loop_with(Plain()), steps=2)  # the first of which is measured


def test_all_vectors_of_a_training_are_compiled_if_a_probe_asks_for_it() -> None:
    with loop_with(SimpleEntropyProbe(compile=True))[2] as measured:
        training: Any = measured._driver._training
        previous = training.measurer._predictions._previous
        holders = training.loop.shard, training.passes, training.measurer._fold_recorder, previous._shard
        assert all(holder.layout.fusion.is_on for holder in holders)


def test_probes_keep_no_reference_to_a_finished_training() -> None:
    """Two loops that share the probe objects and step alternately give the same results as each alone."""
    probes = [SimpleEntropyProbe(), MeasuredStepProbe()]
    alone = train(*loop_with(SimpleEntropyProbe(), MeasuredStepProbe()), steps=2)
    inner = loop_with(*probes)

    def train_inner(model: Any, optimizer: torch.optim.Optimizer) -> None:
        if not inner[2].latest:
            assert repr(train(*inner, steps=2)) == repr(alone)

    assert repr(train(*loop_with(*probes), steps=2, before_optimizer=train_inner)) == repr(alone)


def test_a_state_that_no_checkpoint_can_hold_is_refused_with_the_name_of_its_probe() -> None:
    class Listing(Counting):
        def init(self) -> Any:
            return [0]

    with pytest.raises(UserError, match=r"^probe 'listing': .* list$"):
        ProbeStates([Listing("listing")])


def test_a_trainer_that_is_given_a_probe_as_a_callback_says_where_it_belongs() -> None:
    callbacks: Any = CallbackHandler([SimpleEntropyProbe()], None, None, None, None)
    with pytest.raises(AttributeError, match=r"SimpleEntropyProbe has no on_\w+: a probe is no callback.*attach"):
        callbacks.call_event("on_init_end", None, None, None)


def test_states_of_a_loop_are_loaded_before_it_begins() -> None:
    *_, measured = loop_with(Counting("counting"))
    with measured, pytest.raises(UserError, match=r"load_state_dict.*`with measured_loop"):
        measured.load_state_dict(measured.state_dict())
    assert [*to_tensors(measured._driver.states()["counting"])] == ["steps"]

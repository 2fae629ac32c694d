"""A plain loop's step that fails before optimizer.step() may be repeated, wherever it failed."""

from __future__ import annotations

import contextlib
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_loop import CLIP, loss_of, microbatches, scores_of
from shared_rollouts import MICROBATCH, G
from torch.nn.utils import clip_grad_norm_

from rl_training import (
    Estimate,
    GradientNoiseScaleProbe,
    MeasuredStepProbe,
    Probe,
    Reading,
    SimpleEntropyProbe,
    measured_loop,
)
from rl_training.engine.verifier import UpdateVerifier
from rl_training.entropy import previous_update
from rl_training.hosts.plain.calls import MeasuredLoop
from rl_training.models.load import load_tiny
from rl_training.parallel import vectors
from rl_training.records.jsonl import read_metrics

LEARNING_RATE = 1e-3
COUNT, FAILING, STEPS = 2, 2, 3  # microbatches per step; the step that fails; number of steps
# What fails, in the order of a step: before the step is measured, and after it has used up the previous step's data.
EARLY, LATE = ["backward", "last microbatch"], ["measurement", "optimizer"]
SAME, AGAIN, RESUMED = "in the same `with`", "in another `with`", "by a loop that resumes"


class Failed(Exception):
    pass


class Breakable(Probe):
    """Fails in its measurement if told to."""

    name = "breakable"
    fails = fails_after = False

    def measure(self, ctx: Any, state: Any) -> Reading:
        if self.fails:
            raise Failed
        return Reading(measured={"breakable/step": Estimate(ctx.step.number)})

    def after_step(self, ctx: Any, reading: Reading) -> Reading:
        if self.fails_after:
            raise Failed
        return reading


class Training:
    """A model, its optimizer, and the estimates of a loop for each step."""

    def __init__(self) -> None:
        self.model = load_tiny()[0].train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))
        self.breakable = Breakable()
        self.loop = self.new_loop()
        self.optimizer.register_step_pre_hook(lambda *_: self.fail_at("optimizer"))
        self.place = ""  # where it fails
        self.metrics: dict[str, Any] = {}  # metrics that the loop adds to a step's log line
        self.answers: list[dict[str, Estimate]] = []

    def new_loop(self, **more: Any) -> MeasuredLoop:
        probes = [SimpleEntropyProbe(num_folds=COUNT), MeasuredStepProbe(), GradientNoiseScaleProbe(), self.breakable]
        return measured_loop(
            self.model, self.optimizer, probes, responses_per_prompt=G, microbatch_size=MICROBATCH, microbatches=COUNT,
            max_grad_norm=CLIP, dr_grpo=True, **more,
        )  # fmt: skip

    def fail_at(self, place: str) -> None:
        if place == self.place:
            raise Failed

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.breakable.fails = self.place == "measurement"
        with self.loop.step(number) as metrics:
            for part in microbatches(number)[:COUNT]:
                logps, entropies = scores_of(self.model, part)
                self.loop.microbatch(part, logps, entropies.detach())
                self.fail_at("backward")
                loss_of(logps, part, COUNT).backward()
            self.fail_at("last microbatch")
            self.loop.gradients_ready()
            metrics |= self.metrics
            metrics["grad_norm"] = clip_grad_norm_(self.model.parameters(), CLIP)
            if self.place == "skipped":
                self.loop.skip_step()
                raise Failed
            self.optimizer.step()
            self.fail_at("scheduler")
        self.answers.append({n: e for n, e in self.loop.latest.items() if not n.startswith("probe_cost/")})

    def steps(self, first: int, last: int = STEPS) -> None:
        for number in range(first, last + 1):
            self.step(number)

    def weights(self) -> torch.Tensor:
        return torch.cat([param.detach().flatten() for param in self.model.parameters()])


@functools.cache
def undisturbed() -> tuple[list[dict[str, Estimate]], torch.Tensor]:
    training = Training()
    with training.loop:
        training.steps(1)
    return training.answers, training.weights()


def test_steps_are_numbered_from_1() -> None:
    training = Training()
    with training.loop, pytest.raises(ValueError, match=r"^step 0: .*1$"):
        training.step(0)


def taken_again(place: str, following: str) -> Training:
    """Return a training whose second step fails at `place` and is repeated as `following` says."""
    training = Training()

    def fail() -> None:
        training.place = place
        with pytest.raises(Failed):
            training.step(FAILING)
        training.place = ""

    if following == SAME:
        with training.loop:
            training.steps(1, FAILING - 1)
            fail()
            training.steps(FAILING)
    else:
        with contextlib.suppress(Failed), training.loop:
            training.steps(1, FAILING - 1)
            training.place = place
            training.step(FAILING)
        assert len(training.answers) == FAILING - 1
        training.place = ""
        if following == RESUMED:
            state = training.loop.state_dict()
            training.loop = training.new_loop()
            training.loop.load_state_dict(state)
        with training.loop:
            training.steps(FAILING)
    assert torch.equal(training.weights(), undisturbed()[1])
    return training


def different(first: dict[str, Estimate], other: dict[str, Estimate]) -> set[str]:
    assert first.keys() == other.keys()
    return {name for name, estimate in first.items() if repr(estimate) != repr(other[name])}


@pytest.mark.parametrize("following", [SAME, AGAIN, RESUMED])
@pytest.mark.parametrize("place", EARLY)
def test_a_failed_step_that_is_repeated_is_measured_as_if_it_had_not_failed(place: str, following: str) -> None:
    answers, _ = undisturbed()
    assert [*map(different, taken_again(place, following).answers, answers)] == [set()] * STEPS


@pytest.mark.parametrize("following", [SAME, AGAIN, RESUMED])
@pytest.mark.parametrize("place", LATE)
def test_a_step_that_failed_after_its_measurement_lacks_only_backward_estimates_when_repeated(
    place: str, following: str
) -> None:
    """This concerns the step itself. At the next one only sums and averages over steps differ."""
    answers, _ = undisturbed()
    first, second, third = taken_again(place, following).answers
    assert different(first, answers[0]) == set()
    gone = {name for name in second if name.startswith(("measured/", "delta_h/backward", "delta_h/trapezoid"))}
    sums = {name for name in second if name.startswith("delta_h/cumulative_predicted")}
    assert different(second, answers[1]) == gone | sums
    assert {second[name].code for name in gone if "trapezoid" not in name} <= {"step_taken_again", "first_step"}
    assert all(math.isnan(second[name].value) for name in gone)
    for name in {*third} - sums:
        assert repr(third[name].value) == repr(answers[2][name].value), name


def test_the_step_after_a_failed_one_does_not_use_the_predicted_update_of_that() -> None:
    """A loop that resumes may skip the batch that failed."""
    training = Training()
    with contextlib.suppress(Failed), training.loop:
        training.steps(1, FAILING - 1)
        training.place = "optimizer"
        training.step(FAILING)
    training.place, state = "", training.loop.state_dict()
    training.loop = training.new_loop()
    training.loop.load_state_dict(state)
    with training.loop:
        training.step(FAILING + 1)
    assert training.answers[-1]["delta_h/backward"].code == "first_step"
    assert abs(training.answers[-1]["measured/delta_h"].value) < 1e-5  # no step was made, so 0 up to rounding


def test_a_later_step_after_a_caught_error_is_refused_in_one_line_and_the_failed_one_may_be_repeated() -> None:
    """An edit of the weights before it is repeated is seen, as one between any two steps."""
    for before in (0, 1):
        training = Training()
        with training.loop:
            training.steps(1, before)
            training.place = "backward"
            with pytest.raises(Failed):
                training.step(before + 1)
            training.place = ""
            with pytest.raises(ValueError, match=rf"step {before + 1} failed.*step\({before + 1}\)"):
                training.step(before + 2)
            with torch.no_grad():
                next(training.model.parameters()).mul_(1.01)
            training.steps(before + 1, before + 2)
        codes = [estimates["delta_h/backward"].code for estimates in training.answers]
        assert codes == ["first_step", *["edited_after_step"] * before, "few_folds"]


def test_a_step_that_fails_while_its_update_is_written_over_the_previous_one_says_that_it_is_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vectors, "LARGE", 0)
    compute = previous_update.compute_update
    monkeypatch.setattr(previous_update, "compute_update", lambda *args: training.fail_at("update") or compute(*args))
    training = Training()
    with training.loop:
        training.steps(1, 1)
        training.place = "update"
        with pytest.raises(Failed):
            training.step(2)
        training.place = ""
        training.steps(2, 2)
    assert training.answers[-1]["delta_h/backward"].code == "step_taken_again"


@pytest.mark.parametrize("place", ["scheduler", "probe", "verification", "skipped"])
def test_a_step_that_fails_once_the_optimizer_has_made_it_counts_and_the_next_one_follows(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    compare = UpdateVerifier.compare
    monkeypatch.setattr(UpdateVerifier, "compare", lambda *args: training.fail_at("verification") or compare(*args))
    with training.loop:
        training.place, training.breakable.fails_after = place, place == "probe"
        with pytest.raises(Failed):
            training.step(1)
        training.place, training.breakable.fails_after = "", False
        with pytest.raises(ValueError, match=r"step 1 follows step 1: number"):
            training.step(1)
        if place != "skipped":
            with pytest.raises(ValueError, match="on_policy=False"), training.loop.step(2, rollout_number=1):
                training.loop.microbatch(microbatches(1)[0], *scores_of(training.model, microbatches(1)[0]))
        training.steps(2)
    assert len(training.answers) == STEPS - 1
    if place in ("probe", "verification"):  # whether its update was the formula's is not known
        backward = training.answers[0]["delta_h/backward"]
        assert backward.code == "failed"
        assert backward.reason == "step 1: the step or its measurement failed, so its update was not verified"
    steps = {int(state["step"]) for state in training.optimizer.state.values()}
    assert steps == {STEPS - (place == "skipped")}


def test_parameters_that_are_frozen_between_microbatches_are_named_in_one_line() -> None:
    training = Training()
    first = next(training.model.parameters())
    with training.loop, contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(ValueError, match=r"embed_tokens\.weight"))
        stack.enter_context(training.loop.step(1))
        for part in microbatches(1)[:COUNT]:
            logps, entropies = scores_of(training.model, part)
            training.loop.microbatch(part, logps, entropies.detach())
            loss_of(logps, part, COUNT).backward()
            first.requires_grad_(False)


def test_a_failed_bounded_step_leaves_the_learning_rate_and_the_bounds_state_as_they_were() -> None:
    training = Training()
    training.loop = training.new_loop(target_kl_share=1e-6)
    with training.loop:
        training.step(1)
        before = training.loop.state_dict()["kl_bound"]
        training.place = "optimizer"
        with pytest.raises(Failed):
            training.step(2)
        assert training.loop.state_dict()["kl_bound"] == before
    assert training.optimizer.param_groups[0]["lr"] == LEARNING_RATE


def test_bound_estimates_of_a_failed_step_are_not_reported_for_the_next_one() -> None:
    training = Training()
    training.loop = training.new_loop(target_kl_share=1e-6)
    with training.loop:
        training.breakable.fails_after = True
        with pytest.raises(Failed):
            training.step(1)
        with training.loop.step(2):
            for part in microbatches(2)[:COUNT]:
                logps, entropies = scores_of(training.model, part)
                training.loop.microbatch(part, logps, entropies.detach())
                loss_of(logps, part, COUNT).backward()
            training.loop.skip_step()
    assert not [name for name in training.loop.latest if name.startswith("bound/")]


def test_a_step_whose_line_could_not_be_written_need_not_be_repeated_and_a_loops_own_numbers_stay(
    tmp_path: Path,
) -> None:
    training = Training()
    training.loop = training.new_loop(records=tmp_path)
    with training.loop:
        training.metrics = {"mine": object()}
        with pytest.raises(TypeError, match="JSON"):
            training.step(1)
        training.metrics = {"entropy/token": 1.0}
        with pytest.raises(ValueError, match=r"metrics\['entropy/token'\] .* another name"):
            training.step(2)
        training.metrics = {"reward": np.float32(123.0), "entropy": torch.tensor(77.0)}
        training.step(3)
    assert math.isfinite(training.answers[-1]["delta_h/backward"].value)
    (row,) = read_metrics(tmp_path)
    assert (row["step"], row["reward"], row["entropy"]) == (3, 123.0, 77.0)
    assert row["completions/mean_length"] > 0.0

"""The cost of measuring is reported completely, whatever the order of the probes, and what a step keeps is freed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from seen import Seen
from trainers import ALL_OF, FEW, every_probe
from transformers import TrainerCallback

from rl_training import Estimate, Probe, Reading
from rl_training.engine import driver
from rl_training.engine.build_step import StepBuilder
from rl_training.engine.costs import Costs
from rl_training.engine.kl_bound import KLBound
from rl_training.engine.padding_check import PaddingCheck
from rl_training.engine.requirements import Requirements
from rl_training.engine.step_checks import StepChecks
from rl_training.entropy.prediction import EntropyPredictor
from rl_training.probes import (
    EffectiveSampleSizeProbe,
    GradientNoiseScaleProbe,
    InterventionsProbe,
    SimpleEntropyProbe,
)
from rl_training.records.jsonl import read_estimates
from rl_training.records.writer import Records
from rl_training.step.exchange import Exchange
from rl_training.step.residual import ResidualTest
from rl_training.vocabulary import ENGINE

LONG = 0.2  # seconds, much longer than anything else in these trainings


def slowed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **kwargs)

    return slow


def costs_of(trainer: Any) -> list[dict[str, float]]:
    """Train, and return the reported costs of each step. If vectors are announced, no more of them are held."""
    with pytest.MonkeyPatch.context() as patch:
        messages: list[str] = []
        patch.setattr(driver.logger, "warning", messages.append)
        trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    begin = "probe_cost/"
    costs = [{k.removeprefix(begin): v for k, v in line.items() if k.startswith(begin)} for line in lines]
    announced = re.search(r"keep (\S+) vectors", "\n".join(messages))
    if announced:
        entries = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        held = costs[-1]["buffer_bytes"] / (4 * entries)
        assert held <= float(announced[1]) <= 4 / 3 * held
    return costs


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (PaddingCheck, "check"),
        (StepBuilder, "build"),
        (Exchange, "send"),  # the part of the backward's time that hooks take
        (EntropyPredictor, "predict"),
    ],
)
def test_work_shared_by_probes_is_charged_to_the_engine(make_trainer, monkeypatch, owner: Any, name: str) -> None:
    monkeypatch.setattr(owner, name, slowed(getattr(owner, name), LONG))
    (cost,) = costs_of(make_trainer(probes=[EffectiveSampleSizeProbe(), SimpleEntropyProbe()], max_steps=1, **FEW))
    assert cost["engine_seconds"] > LONG
    assert cost["simple_seconds"] + cost["ess_seconds"] < LONG
    of_all = cost["engine_seconds"] + cost["simple_seconds"] + cost["ess_seconds"]
    assert cost["fraction_of_step"] == pytest.approx(of_all / cost["step_time"])


def test_the_order_of_probes_changes_neither_costs_nor_the_owner_of_the_formula_check(
    make_trainer, tmp_path: Path
) -> None:
    probes: list[Probe] = [SimpleEntropyProbe(), InterventionsProbe(["lr:0.5"], every=1)]
    said = []
    for number, order in enumerate((probes, probes[::-1])):
        folder = tmp_path / str(number)
        settings = {**FEW, "gradient_accumulation_steps": 4}
        (cost,) = costs_of(make_trainer(probes=order, records=Records(folder), max_steps=1, **settings))
        rows = read_estimates(folder)
        said.append(({(row["probe"], row["name"]) for row in rows}, set(cost), cost["buffer_bytes"]))
    assert said[0] == said[1]
    assert (ENGINE, "step/formula_error") in said[0][0]


class TakesVectors(Probe):
    def __init__(self, count: int) -> None:
        self.name, self._count = f"takes_{count}", count
        super().__init__()

    def num_vectors(self, num_folds: int) -> int:
        return self._count

    def measure(self, ctx: Any, state: Any) -> Reading:
        return Reading(measured={f"{self.name}/nothing": Estimate.missing("it only takes room")})


def test_probes_that_allocate_vectors_in_turn_need_the_buffers_of_the_largest_alone(make_trainer) -> None:
    trainer = make_trainer(probes=[TakesVectors(3), TakesVectors(5), TakesVectors(2)], max_steps=1, **FEW)
    (cost,) = costs_of(trainer)
    entries = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert cost["buffer_bytes"] == 5 * 4 * entries


@pytest.mark.parametrize("reserved", [ENGINE, ResidualTest.name, StepChecks.name, KLBound.name])
def test_a_probe_must_not_have_a_name_of_the_engine(reserved: str) -> None:
    class Engine(Seen):
        name = reserved

    with pytest.raises(ValueError, match=rf"\b{reserved}\b"):
        Requirements.of([Engine()])
    with pytest.raises(ValueError, match=r"\['seen'\]"):
        Requirements.of([Seen(), Seen()])


def test_step_time_runs_from_the_end_of_one_step_to_the_end_of_the_next(make_trainer) -> None:
    """They do not use TRL's step_time, which leaves out the optimizer and the time between steps."""

    class Slow(TrainerCallback):
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(LONG)

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(LONG)

    trainer = make_trainer(probes=[GradientNoiseScaleProbe(**ALL_OF["gns"])], **FEW)
    trainer.add_callback(Slow())
    begin = time.perf_counter()
    costs = costs_of(trainer)
    assert all(cost["step_time"] > 2 * LONG for cost in costs)
    assert sum(cost["step_time"] for cost in costs) < time.perf_counter() - begin


def test_reading_costs_changes_nothing_and_is_optional(make_trainer, monkeypatch) -> None:
    """Also: what a step keeps is freed when it ends."""
    trainer = make_trainer(probes=every_probe(), max_steps=1, **FEW)
    asked = []

    def twice(costs: Costs, by_name: Any = Costs.by_name) -> dict[str, float]:
        assert trainer.attachment.driver._started().measurer._fold_recorder.by_fold is None
        asked.append(by_name(costs))
        return by_name(costs)

    monkeypatch.setattr(Costs, "by_name", twice)
    (cost,) = costs_of(trainer)
    assert asked[0] == cost

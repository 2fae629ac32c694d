"""What cannot be measured at a step, by steps that are made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_updates import adamw
from torch import Tensor
from two_turns import FOLDS, LOGITS, G, step_on

from rl_training.engine.entropy_change import measure_entropy_change
from rl_training.engine.memory import StepMemory
from rl_training.engine.probe import Need
from rl_training.engine.ranks import Ranks
from rl_training.engine.step import EntropySettings, OptimizerView, Step
from rl_training.engine.step_by_folds import FEW_FOLDS, why_no_folds
from rl_training.mathematics import adamw as adamw_module
from rl_training.probes import GradientNoiseScaleProbe
from rl_training.tasks.models import load_tiny


@pytest.fixture(scope="module")
def step() -> Step:
    logits = torch.nn.Parameter(torch.tensor(LOGITS, dtype=torch.float64))
    return step_on(logits, torch.arange(FOLDS * G) % 5, {"logits": adamw((3, 3), 0.1, 20)})


def test_products_by_folds_take_four_folds(step: Step) -> None:
    steps = [dataclasses.replace(step, fold_sizes=step.fold_sizes[:n]) for n in (3, 4)]
    assert [why_no_folds(each, "") for each in steps] == [FEW_FOLDS, ""]


def test_the_effective_sample_size_is_that_of_all_ranks(step: Step) -> None:
    """The ratios of this rank's 64 responses are 1. Of the other's 16 are 8 and 48 are 0: (64 + 128)²/(64 + 1024)."""
    rollout = dataclasses.replace(step.batch.rollout, on_policy=False, sampling_logps=step.batch.scores.logps)
    batch = dataclasses.replace(step.batch, rollout=rollout)

    def reduce(sums: Tensor) -> Tensor:
        return sums + sums.new_tensor([128.0, 1024.0])

    two = dataclasses.replace(step, batch=batch, ranks=Ranks(2, reduce), fold_sizes=2 * step.fold_sizes)
    memory = StepMemory(step.gradients.layout, EntropySettings())
    assert "is 0.26 of the sequences" in measure_entropy_change(two, memory, Need.ENTROPY_ROWS).why_none


def test_a_parameter_that_is_not_moved_does_not_make_a_step_adams_first() -> None:
    warm, cold = adamw((2,), 0.0, 20), adamw((2,), 0.0, 0)
    assert not OptimizerView({"warm": warm, "frozen": cold.not_updated()}, 1.0).first_of_adam
    assert OptimizerView({"warm": warm, "cold": cold}, 1.0).first_of_adam


def test_a_parameter_that_the_loss_does_not_reach_does_not_hide_adams_metric_of_the_others(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state stays cold, whatever the number of steps."""
    monkeypatch.setattr(adamw_module, "WARM_STEPS", 1)
    model, probe = load_tiny()[0], GradientNoiseScaleProbe()
    model.unused = torch.nn.Parameter(torch.ones(3))
    make_trainer(probes=[probe], model=model, max_steps=3, max_completion_length=8).train()
    adam = probe.state_dict()["history"][:, 1]
    assert adam.isfinite().all(dim=1).tolist() == [False, True, True]

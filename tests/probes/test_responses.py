"""How much each response moves the entropy: against gradients of single responses, one backward each."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from peft import LoraConfig
from simple_twin import Answers
from trainers import FEW, bare_ending, differing, ending

from rl_training import Estimate, Probe
from rl_training.engine.probe import Need
from rl_training.mathematics.vectors import dot
from rl_training.probes import ResponsesProbe
from rl_training.probes.responses import contributions

EVEN, ODD = slice(0, None, 2), slice(1, None, 2)
FOUR_FOLDS = {**FEW, "gradient_accumulation_steps": 4}


class Differences(Probe):
    """Contributions along two random directions, and the same from a backward per response and the step's formula.

    Of the second step, whose optimizer is warm.
    """

    name = "differences"
    needs = Need.ENTROPY_ROWS

    def prepare(self, step: Any) -> None:
        if step.number != 2:
            return
        layout, parameters = step.entropy_change.layout, step.gradients.parameters
        generator = torch.Generator().manual_seed(0)
        directions = torch.randn(2, layout.num_entries, generator=generator, dtype=layout.dtype)
        assert step.entropy_change.sums is not None
        self.whole, self.halves = self._products(step)
        halves = [list(layout.split(direction)) for direction in directions]
        step.entropy_change.gradient_of = lambda folds: halves[folds.start]
        before = {name: (p.data_ptr(), p.detach().clone()) for name, p in parameters.items()}
        self.by_difference = contributions(step)
        # One of two ranks with as many sequences: its loss is a mean over its own, the step's gradient that of both.
        loss = dataclasses.replace(step.batch.loss_weights, logps=2 * step.batch.loss_weights.logps)
        batch, ranks = dataclasses.replace(step.batch, loss_weights=loss), dataclasses.replace(step.ranks, count=2)
        of_two = dataclasses.replace(step, batch=batch, ranks=ranks)
        vars(of_two)["entropy_change"] = step.entropy_change
        self.as_one_of_two_ranks = contributions(of_two)
        assert all(p.data_ptr() == before[n][0] and torch.equal(p, before[n][1]) for n, p in parameters.items())

        gradient = {name: g.double() for name, g in step.gradients.mean.items()}
        norm = torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt()
        clip = min(1.0, step.optimizer.max_grad_norm / (float(norm) + 1e-6))
        pieces = [layout.by_name(layout.split(d)) for d in directions]
        self.by_backward = []
        for row in range(len(step.batch.fold)):
            with step.policy.measuring():  # in bf16 this reference would be less exact than what it is to check
                logps = step.policy.score(step.batch.rollout, torch.tensor([row])).logps
                weights = step.batch.loss_weights.logps[row : row + 1, : logps.shape[1]]
                own = torch.autograd.grad(logps, list(parameters.values()), weights)
            total = 0.0
            for (name, state), g in zip(step.optimizer.states.items(), own, strict=True):
                v = state.betas[1] * state.exp_avg_sq + (1 - state.betas[1]) * (clip * gradient[name]) ** 2
                v = v / (1 - state.betas[1] ** (state.step + 1))
                factor = -state.lr * (1 - state.betas[0]) / (1 - state.betas[0] ** (state.step + 1))
                change = factor * clip * g / (v.sqrt() + state.eps)
                other = pieces[1 - int(step.batch.fold[row]) % 2][name]
                total += float((other * change.flatten()).sum())
            self.by_backward.append(total)

    def results(self) -> dict[str, Estimate]:
        return {"differences/one": Estimate(1.0)}

    def _products(self, step: Any) -> tuple[float, float]:
        """Returns what ∂H_tok · δθ, of all folds and as the mean of both halves, is off `reuse`, relative to it."""
        change = step.entropy_change
        expected = float(change.quantities["reuse"].value[0])
        of = [float(dot(change.gradient_of(folds), change.update)) for folds in (slice(None), EVEN, ODD)]
        return of[0] / expected - 1, 0.5 * (of[1] + of[2]) / expected - 1


def test_contributions_equal_the_products_of_each_responses_own_gradient(make_trainer) -> None:
    probe = Differences()
    make_trainer(probes=[probe], dtype=torch.float64, adam_epsilon=1e-4, max_grad_norm=0.05, **FOUR_FOLDS).train()
    expected = torch.tensor(probe.by_backward, dtype=torch.float64)
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(probe.by_difference, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
    torch.testing.assert_close(probe.as_one_of_two_ranks, probe.by_difference, rtol=1e-9, atol=0)
    assert (probe.whole, probe.halves) == pytest.approx((0.0, 0.0), abs=1e-9)


class Keeping(ResponsesProbe):
    """The probe, with its answers kept."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.all: list[dict[str, Estimate]] = []

    def results(self) -> dict[str, Estimate]:
        self.all.append(super().results())
        return self.all[-1]


def test_named_responses_come_with_their_texts_lowest_first_and_change_nothing(make_trainer) -> None:
    short, probe = {"max_completion_length": 8}, Keeping(3)
    assert differing(ending(make_trainer(probes=[probe], **short)), bare_ending(**short)) == []
    assert len(probe.all) == 2
    for answer in probe.all:
        named = [answer[f"delta_h/response/{rank}"] for rank in (1, 2, 3)]
        assert named[0].value <= named[1].value <= named[2].value < 0
        for estimate in named:
            assert str(estimate.detail["prompt"]).endswith("=?<think>")
            assert estimate.detail["reward"] in (0.0, 1.0)
            assert estimate.detail["advantage"] != 0


def test_one_fold_names_no_response_and_says_why(make_trainer) -> None:
    probe = Keeping(1)
    make_trainer(probes=[probe], max_steps=1, **{**FEW, "gradient_accumulation_steps": 1}).train()
    assert "larger num_folds" in probe.all[0]["delta_h/response/1"].reason


def test_in_bf16_no_response_is_named_at_adams_first_step(make_trainer) -> None:
    probe, simple = Keeping(1), Answers(own_prompts=True)
    make_trainer(probes=[simple, probe], bf16=True, **FEW).train()
    first, second = probe.all
    assert math.isnan(first["delta_h/response/1"].value)
    assert "bf16 rounding" in first["delta_h/response/1"].reason
    assert math.isfinite(second["delta_h/response/1"].value)
    assert math.isfinite(simple.all[0]["delta_h/own_prompts"].value)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}], ids=str)
def test_contributions_of_an_adapter_are_those_of_single_gradients(make_trainer, settings: dict[str, Any]) -> None:
    probe = Differences()
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    make_trainer(probes=[probe], peft_config=lora, **settings, **FOUR_FOLDS).train()
    both = torch.stack([probe.by_difference.cpu(), torch.tensor(probe.by_backward, dtype=torch.float64)])
    assert float(torch.corrcoef(both)[0, 1]) > 0.98

"""A step is checked, not trusted: where the loop does something else than predicted, there is no prediction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import OPTIONS, model_of, scores_of
from shared_rollouts import L_MAX, PROMPTS, G, given_rollout
from torch.nn.utils import clip_grad_norm_

from rl_training import Estimate, Rollout, measured_loop
from rl_training.engine.batch import take_rows
from rl_training.probes import InterventionsProbe, SimpleEntropyProbe

CLIP, MICROBATCHES = 0.05, 4
Action = Callable[[Any, torch.optim.Optimizer], None]


def nothing(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """What a right loop does beside its steps."""


def estimates(
    steps: int = 2,
    scale: float = 1.0,  # of the loss, as a GradScaler's
    backwards: int = 1,
    between: Action = nothing,  # two microbatches
    ready: Action = nothing,  # after the last backward, before the probes see the gradient
    clip: float | None = CLIP,
    late: Action = nothing,  # between the probes and the optimizer
    after: Action = nothing,  # the optimizer's step, before it has ended
    zero_grad: bool = True,
) -> list[dict[str, Estimate]]:
    """Returns the estimates of each step of a plain loop that promises max_grad_norm=CLIP."""
    model = model_of(OPTIONS | {"dtype": torch.float32})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, eps=1e-5)
    probes = [SimpleEntropyProbe(), InterventionsProbe(["lr:0.5"], every=1)]
    size, found = PROMPTS * G // MICROBATCHES, []
    with measured_loop(
        model, optimizer, probes, responses_per_prompt=G, microbatch_size=size, microbatches=MICROBATCHES,
        max_grad_norm=CLIP, dr_grpo=True,
    ) as measured:  # fmt: skip
        for number in range(1, steps + 1):
            given = given_rollout(number)
            given.pop("num_items_in_batch")
            rollout = Rollout(**given, rewards=given["advantages"], prompt_index=torch.arange(PROMPTS * G) // G)
            with measured.step(number):
                for rows in torch.arange(PROMPTS * G).split(size):
                    part = take_rows(rollout, rows)
                    logps, entropies = scores_of(model, part)
                    measured.microbatch(part, logps, entropies.detach())
                    weighted = (logps - logps.detach()).exp() * part.advantages.unsqueeze(1) * part.completion_mask
                    loss = -scale * weighted.sum() / (size * L_MAX * MICROBATCHES)
                    for left in reversed(range(backwards)):
                        loss.backward(retain_graph=left > 0)
                    between(model, optimizer)
                ready(model, optimizer)
                measured.gradients_ready()
                if clip is not None:
                    clip_grad_norm_(model.parameters(), clip)
                late(model, optimizer)
                handle = optimizer.register_step_post_hook(lambda *_: after(model, optimizer))
                optimizer.step()
                handle.remove()
                if zero_grad:
                    optimizer.zero_grad()
            found.append(dict(measured.latest))
    return found


def each_gradient(change: Callable[[torch.Tensor], torch.Tensor]) -> Action:
    def act(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for param in model.parameters():
            param.grad.copy_(change(param.grad))

    return act


def each_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Action:
    def act(model: Any, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(change(param))

    return act


def another_rate(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 2.0


def another_optimizer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def no_gradients(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


WRONG: dict[str, dict[str, Any]] = {
    "a GradScaler that has not unscaled": {"scale": 1024.0, "late": each_gradient(lambda g: g / 1024.0)},
    "a promised clip that is not made": {"clip": None},
    "a tighter clip than was promised": {"clip": CLIP / 10.0},
    "backward twice": {"backwards": 2},
    "zero_grad between microbatches": {"between": no_gradients},
    "gradients reversed before the probes": {"ready": each_gradient(torch.neg)},
    "gradients reversed behind them": {"late": each_gradient(torch.neg)},
    "another learning rate": {"late": another_rate},
    "a second optimizer": {"late": another_optimizer},
    "zero_grad forgotten": {"zero_grad": False},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_step_that_is_not_what_was_predicted_has_no_prediction_and_says_why(wrong: dict[str, Any]) -> None:
    last = estimates(**wrong)[-1]
    for name in ("delta_h/forward", "intervention/lr:0.5/delta_h"):
        assert math.isnan(last[name].value)
        assert re_matches(last[name].reason), last[name].reason
    assert last["entropy/token"].value > 0.0


def re_matches(reason: str) -> bool:
    return "the gradient differs" in reason or "not the optimizer's formula" in reason


def test_a_right_loop_is_the_formula_to_rounding() -> None:
    for step in estimates():
        assert step["step/formula_error"].value < 1e-5
        assert math.isfinite(step["delta_h/forward"].value)


@pytest.mark.parametrize("change", [lambda w: w * 1.01, torch.randn_like], ids=["edited", "loaded"])
def test_weights_that_change_between_steps_are_no_step_of_the_optimizer(change: Any) -> None:
    last = estimates(after=each_weight(change))[-1]
    assert "step 1: weights were changed" in last["delta_h/backward"].reason


def test_a_step_after_a_wrong_one_does_not_look_back_on_it_and_means_leave_it_out() -> None:
    rates = iter([6e-4, 3e-4])

    def first_only(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = next(rates)

    def as_before(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 3e-4

    wrong, right = estimates(late=first_only, after=as_before)
    assert math.isnan(wrong["delta_h/forward"].value)
    assert "step 1" in right["delta_h/backward"].reason
    name = "intervention/lr:0.5/"
    assert right[f"{name}mean_delta_h"].value == pytest.approx(right[f"{name}delta_h"].value, rel=1e-9)

"""Steps are verified: if the loop does something other than what was predicted, there is no prediction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import OPTIONS, model_of
from plain_loop import CLIP, Action, no_action, train
from shared_rollouts import G

from rl_training import Estimate, measured_loop
from rl_training.engine.verifier import EDITED_AFTER_STEP, EDITED_BEFORE_STEP
from rl_training.optim.adamw import adamw_delta
from rl_training.parallel import vectors
from rl_training.probes import GradientNoiseScaleProbe, InterventionsProbe, SimpleEntropyProbe
from rl_training.statistics.unavailable import Unavailable

SIZE, COUNT = G, 4


def estimates(
    after: Action = no_action,
    dtype: torch.dtype = torch.float32,
    rate: float = 3e-4,
    probes: Any = None,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **wrong: Any,
) -> list[dict[str, Estimate]]:
    """Return the estimates of two steps of a plain loop that promises max_grad_norm=CLIP.

    Args:
        after: What happens at the end of the optimizer's step, before it returns.
        dtype: Dtype of the weights.
        rate: Learning rate.
        probes: None means probes that predict.
        kind: Class of the optimizer.
        wrong: Further arguments of plain_loop.train.
    """
    model = model_of(OPTIONS | {"dtype": dtype})
    optimizer = kind(model.parameters(), lr=rate, eps=1e-5)
    probes = probes or [SimpleEntropyProbe(), InterventionsProbe(["lr:0.5"], every=1)]
    measured = measured_loop(
        model, optimizer, probes, responses_per_prompt=G, microbatch_size=SIZE, microbatches=COUNT, max_grad_norm=CLIP,
        dr_grpo=True,
    )  # fmt: skip

    def behind(model: Any, optimizer: torch.optim.Optimizer) -> None:
        wrong.get("before_optimizer", no_action)(model, optimizer)
        handle = optimizer.register_step_post_hook(lambda *_: (after(model, optimizer), handle.remove()))

    return train(model, optimizer, measured, 2, size=SIZE, count=COUNT, **wrong | {"before_optimizer": behind})


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


def doubled_gradients(model: Any, optimizer: torch.optim.Optimizer) -> None:
    next(model.parameters()).register_hook(lambda gradient: 2.0 * gradient)


WRONG: dict[str, dict[str, Any]] = {
    "a GradScaler that has not unscaled": {
        "backward": lambda loss: (1024.0 * loss).backward(),
        "before_optimizer": each_gradient(lambda g: g / 1024.0),
    },
    "a promised clip that is not made": {"clip": None},
    "a tighter clip than was promised": {"clip": CLIP / 10.0},
    "backward twice": {"backward": lambda loss: [loss.backward(retain_graph=True) for _ in range(2)]},
    "zero_grad between microbatches": {"between": no_gradients},
    "gradients reversed before the probes": {"ready": each_gradient(torch.neg)},
    "gradients reversed behind them": {"before_optimizer": each_gradient(torch.neg)},
    "another learning rate": {"before_optimizer": another_rate},
    "a second optimizer": {"before_optimizer": another_optimizer},
    "zero_grad forgotten": {"zero_grad": False},
    "weights edited between microbatches": {"between": each_weight(lambda weight: 1.01 * weight)},
    "weights edited before the probes": {"ready": each_weight(lambda weight: 1.01 * weight)},
    "gradients that run through hooks": {"between": doubled_gradients},
}


CODES = {"gradient_mismatch", "gradient_in_parts", "not_the_formula", "edited_within_step", "hooked"}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_step_that_differs_from_the_predicted_one_has_no_prediction_but_a_reason(wrong: dict[str, Any]) -> None:
    last = estimates(**wrong)[-1]
    for name in ("delta_h/forward", "intervention/lr:0.5/delta_h"):
        assert math.isnan(last[name].value)
        assert last[name].code in CODES
    assert last["entropy/token"].value > 0.0 or last["entropy/token"].reason == last["delta_h/forward"].reason


class ExactShares:
    """Computes from all weights in fp64 which share of each step survives rounding, in total and by layer."""

    def __init__(self) -> None:
        self.found: list[tuple[float, dict[str, float]]] = []

    def before_optimizer(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.before = {name: param.detach().double() for name, param in model.named_parameters()}
        group, self.intended = optimizer.param_groups[0], {}
        for name, param in model.named_parameters():
            state = optimizer.state[param] or {"exp_avg": 0.0 * param, "exp_avg_sq": 0.0 * param, "step": 0}
            moments = [state[key].double() for key in ("exp_avg", "exp_avg_sq")]
            settings = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            parts = adamw_delta(self.before[name], param.grad.double(), *moments, int(state["step"]), **settings)
            self.intended[name] = parts.total

    def after(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        moved = {name: param.detach().double() - self.before[name] for name, param in model.named_parameters()}
        parts = {"0": ".layers.0.", "1": ".layers.1.", "embedding": "embed", "norm": "model.norm"}
        by_layer = {part: self.share(moved, [name for name in moved if word in name]) for part, word in parts.items()}
        self.found.append((self.share(moved, list(moved)), by_layer))

    def share(self, moved: dict[str, torch.Tensor], names: list[str]) -> float:
        products = sum((moved[name] * self.intended[name]).sum() for name in names)
        return float(products / sum(self.intended[name].square().sum() for name in names))


@pytest.mark.parametrize("rate", [1e-6, 1e-4])
def test_the_sampled_surviving_share_of_a_bf16_update_is_within_a_hundredth_of_the_exact_one(
    rate: float, monkeypatch
) -> None:
    monkeypatch.setattr(vectors, "MAX_SAMPLED", 2**14)  # of 105,000 weights
    exact = ExactShares()
    steps = estimates(dtype=torch.bfloat16, rate=rate, before_optimizer=exact.before_optimizer, after=exact.after)
    for step, (whole, by_layer) in zip(steps, exact.found, strict=True):
        assert step["update/surviving_share"].value == pytest.approx(whole, abs=0.01)
        least = step["update/surviving_share/least"]
        assert least.value == pytest.approx(min(by_layer.values()), abs=0.02)
        assert by_layer[str(least.detail["layer"])] == pytest.approx(min(by_layer.values()), abs=0.02)
        assert f"{1.0 - step['update/surviving_share'].value:.0%} of this step is lost" in (
            step["update/surviving_share"].reason
        )
        assert step["step/formula_error"].value < 0.05
        assert math.isfinite(step["delta_h/forward"].value)
    assert exact.found[-1][0] < 0.5


def round_at_random(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Multiply each weight by 1 − ε, 1 or 1 + ε at random, unlike rounding to nearest."""
    with torch.no_grad():
        for param in model.parameters():
            ulp = torch.finfo(param.dtype).eps
            param.mul_(1.0 + ulp * torch.randint(-1, 2, param.shape))


WRONG_IN_BF16: dict[str, dict[str, Any]] = {
    "another rounding": {"before_optimizer": round_at_random},
    "another learning rate": {"before_optimizer": another_rate},
    "garbage": {"before_optimizer": each_weight(torch.randn_like)},
}


@pytest.mark.parametrize("wrong", WRONG_IN_BF16.values(), ids=WRONG_IN_BF16)
def test_a_bf16_step_not_rounded_to_nearest_has_a_backward_estimate_alone(wrong: dict[str, Any]) -> None:
    """The step itself is measured from the weights. Garbage weights make the model useless but raise no error."""
    last = estimates(dtype=torch.bfloat16, rate=1e-4, **wrong)[-1]
    assert math.isnan(last["delta_h/forward"].value)
    assert last["delta_h/forward"].code == "not_the_formula"
    assert math.isfinite(last["delta_h/backward"].value)


@pytest.mark.parametrize("name", ["zero_grad forgotten", "zero_grad between microbatches"])
def test_fold_norms_alone_are_also_checked_against_the_gradient_of_the_step(name: str) -> None:
    probe = [GradientNoiseScaleProbe()]
    right, wrong = (estimates(probes=probe, **action)[-1]["gns/trace_step"] for action in ({}, WRONG[name]))
    assert right.value > 0
    assert wrong.code == "gradient_mismatch"


def test_weights_that_become_nan_are_not_the_step_of_the_optimizer() -> None:
    first, _ = estimates(before_optimizer=each_weight(lambda weight: torch.full_like(weight, math.nan)))
    assert first["step/formula_error"].value == math.inf
    assert first["delta_h/forward"].code == "not_the_formula"


def test_the_step_of_a_correct_loop_equals_the_formula_up_to_rounding() -> None:
    for step in estimates():
        assert step["step/formula_error"].value < 1e-5
        assert math.isfinite(step["delta_h/forward"].value)
        shares = [e for name, e in step.items() if name.startswith("update/surviving_share")]
        assert len(shares) == 2  # the total and the worst layer's, whatever the number of layers
        assert all(share.value == pytest.approx(1.0, abs=1e-3) and "lost" not in share.reason for share in shares)


@pytest.mark.parametrize("change", [lambda w: w * 1.01, torch.randn_like], ids=["edited", "loaded"])
def test_weights_changed_between_steps_are_not_the_step_of_the_optimizer(change: Any) -> None:
    last = estimates(after=each_weight(change))[-1]
    assert last["delta_h/backward"].reason == EDITED_AFTER_STEP.prefixed("step 1")


def other_weights(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Move the weights of the norms, like a second, undeclared optimizer."""
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    torch.optim.SGD(norms, lr=1.0).step()


# For an optimizer without a formula: what else changes the weights and when, and the expected reason.
WITHOUT_FORMULA: dict[str, tuple[dict[str, Any], Unavailable | None]] = {
    "nothing": ({}, None),
    "a second optimizer behind it": ({"after": other_weights}, EDITED_AFTER_STEP),
    "a second optimizer before it": ({"before_optimizer": other_weights}, EDITED_BEFORE_STEP),
    "edited behind it": ({"after": each_weight(lambda weight: 1.01 * weight)}, EDITED_AFTER_STEP),
    "edited before it": ({"before_optimizer": each_weight(lambda weight: 1.01 * weight)}, EDITED_BEFORE_STEP),
}


@pytest.mark.parametrize("what", WITHOUT_FORMULA)
def test_without_a_formula_backward_needs_that_only_the_optimizer_moved_the_weights(what: str) -> None:
    """X · (θ_after − θ_before) needs the optimizer's step alone; otherwise it covers two changes, or part of one."""
    actions, reason = WITHOUT_FORMULA[what]
    _, last = estimates(kind=torch.optim.Adagrad, probes=[SimpleEntropyProbe()], **actions)
    backward = last["delta_h/backward"]
    assert backward.reason == (reason.prefixed("step 1") if reason else "")
    assert math.isnan(backward.value) == (reason is not None)


def test_a_learning_rate_set_within_the_step_is_the_one_predicted_with() -> None:
    """A loop may set it anywhere before gradients_ready()."""
    inside, before = estimates(ready=another_rate), estimates(rate=6e-4)
    assert inside[0]["delta_h/forward"] == before[0]["delta_h/forward"]


@pytest.mark.parametrize("trained", [False, True])
def test_parameters_frozen_or_unfrozen_after_the_start_are_refused_by_name(trained: bool) -> None:
    """The steps of parameters that are trained only later would silently be missing from every product."""

    def change(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model.model.norm.requires_grad_(False)
        model.register_parameter("late", torch.nn.Parameter(torch.ones(1), requires_grad=trained))
        if trained:
            model.model.norm.requires_grad_(True)

    with pytest.raises(ValueError, match=r"\blate\b" if trained else r"model\.norm\.weight"):
        estimates(after=change)


def test_a_step_that_fails_verification_has_no_backward_estimate_and_is_in_no_mean() -> None:
    rates = iter([6e-4, 3e-4])

    def first_only(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = next(rates)

    def as_before(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 3e-4

    wrong, right = estimates(before_optimizer=first_only, after=as_before)
    assert math.isnan(wrong["delta_h/forward"].value)
    assert right["delta_h/backward"].code == "not_the_formula"
    name = "intervention/lr:0.5/"
    assert right[f"{name}mean_delta_h"].value == pytest.approx(right[f"{name}delta_h"].value, rel=1e-9)


def test_a_gradient_that_is_changed_after_it_was_measured_leaves_a_remark_on_its_noise() -> None:
    """It is scaled back by hand, or gets noise, without clipping. An honest loop that clips has no remark."""
    changes = {
        "multiplied by 0.001": (each_gradient(lambda g: 1e-3 * g), None),
        "was changed by": (each_gradient(lambda g: g + 0.5 * g.std() * torch.randn_like(g)), None),
        "": (no_action, CLIP),
    }
    for words, (change, clip) in changes.items():
        model = model_of(OPTIONS)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        measured = measured_loop(
            model, optimizer, [GradientNoiseScaleProbe()], responses_per_prompt=G, microbatch_size=SIZE,
            microbatches=COUNT, max_grad_norm=clip,
        )  # fmt: skip
        answer = train(model, optimizer, measured, 1, size=SIZE, count=COUNT, clip=clip, before_optimizer=change)[0]
        for name in ("gns/trace_step", "gns/grad_sq_norm_step"):
            assert math.isfinite(answer[name].value)
            assert words in answer[name].reason, (words, answer[name].reason)
            assert ("measured before" in answer[name].reason) == bool(words)

"""The measured step on a real trainer, compared with its definition using copies of the model, for any optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from layouts import scores_of
from peft import LoraConfig, get_peft_model
from seen import Kept
from torch import Tensor
from trainers import LORA, graded, trainer_maker

from rl_training import Estimate, Reading
from rl_training.engine.context import StepContext
from rl_training.models.load import load_tiny
from rl_training.probes import MeasuredStepProbe
from rl_training.probes.measured import (
    CHANGES,
    ESS,
    KL,
    LENGTH,
    MAX_RESCORE_DIFFERENCE,
    NAMES,
    REWARD,
    STEPS,
    rounded_scores_before,
)
from rl_training.step.data import StepData

G, PROMPTS = 4, 8
SHAPE: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "reward": graded}


class Answers(Kept, MeasuredStepProbe):
    """The probe, which keeps its estimates, and each step with a copy of the model in fp64."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.models: list[Any] = []

    def measure(self, ctx: StepContext, state: Any) -> Reading:
        reading = super().measure(ctx, state)
        model: Any = load_tiny()[0]  # no deepcopy, because TRL's patched forward would use the original's weights
        if hasattr(ctx.policy.model, "peft_config"):
            model = get_peft_model(model, LoraConfig(**LORA))
        model.load_state_dict(ctx.policy.model.state_dict())
        self.models.append(model.double().eval())
        return reading


def rprop(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Rprop(model.parameters(), lr=1e-4)  # its steps use only signs


def adafactor(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-3)


def muon(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in model.parameters() if param.ndim == 2], lr=1e-3)


def num_characters(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.1 * len(text) for text in completions]


def ragged(values: Tensor, mask: Tensor) -> list[list[float]]:
    return [row[m.bool()].tolist() for row, m in zip(values.double(), mask, strict=True)]


def plain(before: Any, now: Any, step: StepData, scored: int, steps: int = 1) -> dict[str, tuple[float, float]]:
    """Return each change with its error over prompts, computed from two models one response at a time."""
    rollout = step.batch.rollout
    with torch.no_grad():
        (logps, h), (logps_before, h_before) = (
            [ragged(values, rollout.completion_mask) for values in scores_of(model, rollout)] for model in (now, before)
        )
    rows_of: dict[int, list[int]] = {}
    functions = [rollout.rewards.tolist(), *(values.tolist() for values in rollout.rewards_by_name.values())]
    for row, prompt in enumerate(rollout.prompt_index.tolist()):
        rows_of.setdefault(prompt, []).append(row)
    table = []
    for rows in rows_of.values():
        assert len(rows) == G
        terms = []
        for row in rows[:scored]:
            others = [other for other in rows if other != row]
            of_functions = [
                reference.terms_before(
                    logps[row], h[row], logps_before[row], h_before[row], rewards[row],
                    [h[other] for other in others], [rewards[other] for other in others],
                )
                for rewards in functions
            ]  # fmt: skip
            entropy, length, _, kl, log_weight = of_functions[0]
            terms.append([entropy, length, kl, log_weight, *(of_function[2] for of_function in of_functions)])
        more, longer, kl, _, *rewarded = [sum(column) / scored for column in zip(*terms, strict=True)]
        weights = [math.exp(term[3]) for term in terms]
        tokens = sum(len(h[row]) for row in rows[:scored]) / scored
        table.append([1.0, sum(sum(h[r]) for r in rows) / G, sum(len(h[r]) for r in rows) / G, more, longer, kl, tokens,
                      sum(weights), sum(weight**2 for weight in weights), *rewarded])  # fmt: skip

    def changes(sums: list[float]) -> list[float]:
        count, entropy, length, more, longer, kl, tokens, weight, square, *rewarded = sums
        token = entropy / length - (entropy + more) / (length + longer)
        return [
            token,
            -more / count,
            -longer / count,
            *(-reward / count for reward in rewarded),
            kl / tokens,
            weight**2 / square / (count * scored),
        ]

    values = changes([sum(column) for column in zip(*table, strict=True)])
    errors = [reference.jackknife_stderr(lambda sums, i=i: changes(sums)[i], table) for i in range(len(values))]
    names = (*CHANGES, *(f"{REWARD}/{name}" for name in rollout.rewards_by_name), KL, ESS)
    changes_with_errors = dict(zip(names, zip(values, errors, strict=True), strict=True))
    return changes_with_errors | {STEPS: (float(steps), math.nan)}


def sums_of(changes: list[dict[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Return the sums of the changes of length and rewards over several batches, whose variances add up."""
    names = [name for name in changes[0] if name.startswith((LENGTH, REWARD))]
    sums = {name: [change[name] for change in changes] for name in names}
    return {
        name.replace("delta", "cumulative"): (sum(v for v, _ in parts), math.hypot(*(error for _, error in parts)))
        for name, parts in sums.items()
    }


def assert_same(
    estimates: dict[str, Estimate], expected: dict[str, tuple[float, float]], tolerance: float = 2e-3
) -> None:
    """Compare relative to value or error, because training is in fp32."""
    assert {name for name in estimates if "cumulative" not in name or name in expected} == expected.keys()
    for name, (value, stderr) in expected.items():
        scale = max(abs(value), 0.0 if math.isnan(stderr) else stderr)
        assert estimates[name].value == pytest.approx(value, abs=tolerance * scale), name
        error = float(estimates[name].detail.get("stderr_of_batch", estimates[name].stderr))
        assert error == pytest.approx(stderr, rel=5 * tolerance, nan_ok=True), name


@pytest.mark.parametrize(("optimizer", "scored"), [(rprop, 1), (muon, 4), (adafactor, 2)])
def test_the_measured_change_equals_its_definition_for_any_optimizer(
    make_trainer, optimizer: Callable[[Any], torch.optim.Optimizer], scored: int
) -> None:
    probe, model = Answers(scored, error_decay=0.0), load_tiny()[0]
    settings = SHAPE | {"optimizers": (optimizer(model), None), "max_steps": 3, "max_completion_length": 24}
    settings |= {"reward": [graded, num_characters], "reward_weights": [2.0, 0.0]}  # the second is only watched
    make_trainer(probes=[probe], model=model, **settings).train()
    assert {e.code for e in probe.all[0].values()} == {"no_earlier_weights"}
    assert [*probe.kept_steps[1].batch.rollout.rewards_by_name] == ["graded", "num_characters"]
    changes = []
    for number in (1, 2):
        changes.append(plain(*probe.models[number - 1 : number + 1], probe.kept_steps[number], scored))
        assert_same(probe.all[number], changes[-1] | sums_of(changes))
        assert {e.about_step for e in probe.all[number].values()} == {number}
    assert abs(probe.all[2][CHANGES[0]].value) > 1e-4


def test_measured_changes_are_scored_without_dropout(make_trainer) -> None:
    """Training's own scores have dropout, but the policy that samples has none, and its entropy is measured."""
    probe = Answers(1, error_decay=0.0)
    settings = SHAPE | {"learning_rate": 5e-3}
    make_trainer(probes=[probe], peft_config=LoraConfig(**LORA), max_steps=2, **settings).train()
    step = probe.kept_steps[1]
    fresh = probe.contexts[1].policy.score_rollout(step.batch.rollout)
    dropped = (fresh.logps - step.batch.scores.logps)[fresh.mask.bool()].abs().mean()
    assert float(dropped) > 10 * MAX_RESCORE_DIFFERENCE
    value, stderr = plain(*probe.models, step, 1)[CHANGES[1]]
    assert probe.all[1][CHANGES[1]].value == pytest.approx(value, abs=0.05 * stderr)  # the baselines are training's


def test_steps_on_one_rollout_are_measured_together_with_the_next_rollout(make_trainer) -> None:
    probe = Answers(1, error_decay=0.0)
    make_trainer(probes=[probe], num_iterations=2, max_steps=5, **SHAPE).train()
    for number in (2, 4):
        assert {e.code for e in probe.all[number - 1].values()} == {"old_rollout"}
    for number in (3, 5):
        before, now = (probe.models[number - back] for back in (3, 1))
        assert_same(probe.all[number - 1], plain(before, now, probe.kept_steps[number - 1], scored=1, steps=2))


def test_with_every_above_one_the_change_is_since_the_last_measured_step(make_trainer) -> None:
    probe = Answers(1, every=2, error_decay=0.0)
    make_trainer(probes=[probe], max_steps=3, **SHAPE).train()
    assert_same(probe.all[1], plain(*probe.models, probe.kept_steps[1], scored=1, steps=2))


def test_steps_too_far_apart_have_no_change_but_their_distance(make_trainer) -> None:
    probe = Answers()
    make_trainer(probes=[probe], learning_rate=3e-2, **SHAPE).train()
    estimates = probe.all[1]
    assert estimates[ESS].value < 0.5
    assert {estimates[name].code for name in CHANGES} == {"low_ess"}
    assert estimates[KL].value > 0.1


def test_with_rounded_scores_the_measured_change_is_a_central_difference(make_trainer) -> None:
    """Here nothing is rounded, so both ends of the difference can be checked."""

    class Central(Answers):
        def measure(self, ctx: StepContext, state: Any) -> Reading:
            if state.step:
                rows, before = torch.arange(G * PROMPTS), state.weights.local(ctx.policy.shard)
                self.now, self.found = rounded_scores_before(ctx, rows, before)
            return super().measure(ctx, state)

    probe = Central()
    make_trainer(probes=[probe], max_steps=2, **SHAPE).train()
    weights, scores = [dict(model.named_parameters()) for model in probe.models], []
    for steps in (-3, 3):
        model = load_tiny()[0].double()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(weights[1][name] + steps * (weights[1][name] - weights[0][name]))
            scores.append(scores_of(model, probe.kept_steps[1].batch.rollout))
    mask = probe.found.mask.bool()
    for value, now, behind, ahead in zip(
        (probe.found.logps, probe.found.entropies), (probe.now.logps, probe.now.entropies), *scores, strict=True
    ):
        expected = -(ahead - behind)[mask] / 6
        assert float(expected.abs().max()) > 1e-2
        torch.testing.assert_close((value - now)[mask], expected, rtol=1e-3, atol=1e-5)


def test_under_autocast_the_measured_change_has_a_remark(make_trainer) -> None:
    """Its value is affected by rounding, but less than by the sampling error of few responses."""
    probe = Answers(4, error_decay=0.0)
    settings = SHAPE | {"learning_rate": 1e-4}
    make_trainer(probes=[probe], bf16=True, use_cpu=True, max_steps=2, **settings).train()
    expected = plain(*probe.models, probe.kept_steps[1], 4)
    for name in CHANGES:
        estimate = probe.all[1][name]
        assert estimate.reason.startswith("a central difference over ± 3 steps")
        assert estimate.value == pytest.approx(expected[name][0], abs=expected[name][1]), name


def test_a_resumed_run_gives_the_estimates_of_the_uninterrupted_one(tmp_path: Path) -> None:
    settings = SHAPE | {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "max_completion_length": 8}
    trainer = trainer_maker(tmp_path)(probes=[MeasuredStepProbe()], **settings)
    trainer.train()
    latest = repr({name: trainer.attachment.latest[name] for name in NAMES})
    assert math.isfinite(trainer.attachment.latest[CHANGES[0]].value)
    trainer = trainer_maker(tmp_path)(probes=[MeasuredStepProbe()], **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "state" / "checkpoint-2"))
    assert repr({name: trainer.attachment.latest[name] for name in NAMES}) == latest

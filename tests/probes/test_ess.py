"""The effective sample size, by hand, and compared with the plain definition on a real trainer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from seen import Kept
from trl import GRPOTrainer

from rl_training import Estimate, attach
from rl_training.policy.rollout import Rollout
from rl_training.probes import EffectiveSampleSizeProbe
from rl_training.probes.ess import without_rounding
from rl_training.statistics.kish import kish_size, kish_size_of_sums, kish_sums

SIZES = ("ess/advantage", "ess/token_weight")
FRACTIONS = tuple(f"{name}_fraction" for name in SIZES)
METRICS = {*SIZES, *FRACTIONS, "ess/importance", "ess/zero_advantage", "ess/zero_advantage_prompts"}


class Answers(Kept, EffectiveSampleSizeProbe):
    """The probe, which keeps its estimates and steps."""


def half_of_the_prompts(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Return rewards that differ within prompts with even answers, and are equal within the others."""
    return [0.1 if int(a) % 2 else len(c) / 10 for c, a in zip(completions, answer, strict=True)]


def constant(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.1] * len(completions)


def plain_size(weights: list[float]) -> float:
    """Return (Σ|w|)² / Σw², term by term."""
    return sum(abs(w) for w in weights) ** 2 / sum(w * w for w in weights)


def plain_answers(rollout: Rollout) -> dict[str, float]:
    """Return every metric of an on-policy step with whole prompts, by definition, one sequence at a time."""
    advantages = rollout.advantages.tolist()
    lengths = [sum(row) for row in rollout.completion_mask.tolist()]
    of_prompt: dict[int, list[float]] = {}
    for prompt, advantage in zip(rollout.prompt_index.tolist(), advantages, strict=True):
        of_prompt.setdefault(prompt, []).append(advantage)
    size = plain_size(advantages)
    token_size = plain_size([a * n for a, n in zip(advantages, lengths, strict=True)])
    return {
        "ess/advantage": size,
        "ess/token_weight": token_size,
        "ess/advantage_fraction": size / len(advantages),
        "ess/token_weight_fraction": token_size / len(advantages),
        "ess/importance": len(advantages),
        "ess/zero_advantage": advantages.count(0.0) / len(advantages),
        "ess/zero_advantage_prompts": sum(not any(group) for group in of_prompt.values()) / len(of_prompt),
    }


def values(answer: dict[str, Estimate]) -> dict[str, float]:
    return {name: estimate.value for name, estimate in answer.items()}


# --- the pure functions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        ([1.0, 1.0, 2.0], 16 / 6),  # (1+1+2)² / (1+1+4)
        ([1.0, -3.0], 16 / 10),  # signs do not matter
        ([4.0, 3.0, 0.0, 0.0, 0.0], 49 / 25),  # sequences without weight do not count
    ],
)
def test_kish_size_equals_the_value_by_hand(weights: list[float], size: float) -> None:
    assert kish_size(torch.tensor(weights)) == pytest.approx(size, rel=1e-15)


@pytest.mark.parametrize("scale", [1e-20, 0.3, 1e20])
def test_equal_weights_give_their_number_and_a_single_weight_gives_1_at_any_scale(scale: float) -> None:
    assert kish_size(torch.full((7,), scale)) == pytest.approx(7, rel=1e-12)
    assert kish_size(torch.tensor([0.0, -scale, 0.0])) == pytest.approx(1, rel=1e-12)


def test_all_zero_weights_have_no_size() -> None:
    assert math.isnan(kish_size(torch.zeros(5)))


@pytest.mark.parametrize("sizes", [[32], [8] * 4, [5, 27], [1] * 32])
def test_the_size_from_summed_parts_does_not_depend_on_the_split_of_the_batch(sizes: list[int]) -> None:
    weights = torch.randn(32, generator=torch.Generator().manual_seed(0))
    total, squares = sum(kish_sums(part) for part in weights.split(sizes)).tolist()
    assert kish_size_of_sums(total, squares) == pytest.approx(plain_size(weights.tolist()), rel=1e-12)


def test_only_rounding_in_a_prompt_with_equal_advantages_is_removed() -> None:
    rewards = torch.tensor([[0.1] * 8, [0.1] * 7 + [0.2]])
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    assert 0 < advantages[0].abs().max() < 1e-7  # otherwise there is nothing to remove
    cleaned = without_rounding(advantages)
    assert cleaned[0].tolist() == [0.0] * 8
    assert torch.equal(cleaned[1], advantages[1])


# --- on a trainer -----------------------------------------------------------------------------------------------------


def test_every_estimate_equals_its_plain_definition_on_the_recorded_rollout(make_trainer) -> None:
    probe = Answers()
    trainer = make_trainer(probes=[probe], reward=half_of_the_prompts)
    trainer.train()
    assert len(probe.all) == 2
    for ctx, step, answer in zip(probe.contexts, probe.kept_steps, probe.all, strict=True):
        assert ctx.num_prompts == len(set(step.batch.rollout.prompt_index.tolist())) > 1
        plain = plain_answers(step.batch.rollout)
        assert answer.keys() == plain.keys() == METRICS
        assert values(answer) == pytest.approx(plain, rel=1e-12)
        assert 0 < plain["ess/zero_advantage_prompts"] < 1  # the reward gives both kinds of prompts
        assert 1 < plain["ess/token_weight"] != plain["ess/advantage"] < 32
        assert all(e.num_samples == 32 and math.isnan(e.stderr) and e.reason for e in answer.values())
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["ess/advantage"] for row in logged] == [answer["ess/advantage"].value for answer in probe.all]
    for row in logged:  # TRL computes the same share from the rewards
        assert row["ess/zero_advantage_prompts"] == pytest.approx(row["frac_reward_zero_std"], rel=1e-6)


def test_all_zero_advantages_have_no_size_but_a_reason(make_trainer) -> None:
    probe = Answers()
    make_trainer(probes=[probe], reward=constant, num_generations=8, max_steps=1).train()
    # Eight rewards of 0.1 leave only rounding, which must not count as a weight.
    assert probe.kept_steps[0].batch.rollout.advantages.abs().max() > 0
    (answer,) = probe.all
    for name in (*SIZES, *FRACTIONS):
        assert math.isnan(answer[name].value)
        assert answer[name].code == "no_weight"
    assert answer["ess/zero_advantage"].value == answer["ess/zero_advantage_prompts"].value == 1
    assert answer["ess/importance"].value == 32


def test_importance_size_of_an_off_policy_step_is_kishs_size_of_the_policy_ratios(make_trainer) -> None:
    probe = Answers()
    make_trainer(probes=[probe], reward=half_of_the_prompts, num_iterations=2).train()
    on_policy, off_policy = probe.all
    assert on_policy["ess/importance"].value == 32
    before, now = (step.batch.scores for step in probe.kept_steps)  # the same sequences in the same order
    ratios = [
        math.exp(sum(float(b - a) for a, b, m in zip(*rows, strict=True) if m))
        for rows in zip(before.logps, now.logps, now.mask, strict=True)
    ]
    assert off_policy["ess/importance"].value == pytest.approx(plain_size(ratios), rel=1e-5)
    assert off_policy["ess/importance"].value < 32
    assert off_policy["ess/advantage"].value == pytest.approx(on_policy["ess/advantage"].value)  # the same rollout


def test_ratios_beyond_float64_have_no_size_but_a_reason(make_trainer) -> None:
    probe = Answers()
    make_trainer(probes=[probe], max_steps=1, max_completion_length=8).train()
    ctx, batch = probe.contexts[0], probe.kept_steps[0].batch
    rollout = dataclasses.replace(batch.rollout, sampling_logps=batch.scores.logps - 1000.0)
    step = dataclasses.replace(ctx.step, batch=dataclasses.replace(batch, rollout=rollout))
    reading = probe.measure(dataclasses.replace(ctx, step=step), None)
    assert reading.estimates["ess/importance"].code == "no_ratio"


def test_prompts_spread_over_steps_have_no_share_but_a_fix(make_trainer) -> None:
    probe, trainer = Answers(), make_trainer(GRPOTrainer, steps_per_generation=8, reward=half_of_the_prompts)
    with attach(trainer, probes=[probe]):
        trainer.train()
    for ctx, answer, step in zip(probe.contexts, probe.all, probe.kept_steps, strict=True):
        assert step.reasons.split_prompts
        assert ctx.num_prompts is None
        assert math.isnan(answer["ess/zero_advantage_prompts"].value)
        assert answer["ess/zero_advantage_prompts"].code == "split_prompts"
        advantages = step.batch.rollout.advantages.tolist()
        assert answer["ess/advantage"].value == pytest.approx(plain_size(advantages), rel=1e-12)
        assert answer["ess/zero_advantage"].value == advantages.count(0.0) / 32

"""The reward gradient: a multiple of the step's gradient only if the loss weights imply it, otherwise recomputed."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_steps import ALONE
from own_losses import PLAIN, Longer, PositiveSamples, WithSupervision, above_the_others, some_rewards
from ranks_in_threads import on_two_ranks
from seen import Seen
from torch import Tensor
from trainers import FEW, graded
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from rl_training import Reading, attach
from rl_training.engine.loss_info import OTHER_TERMS
from rl_training.engine.reward_check import RELATIVE_REWARDS, RewardCheck
from rl_training.engine.step_checks import StepChecks
from rl_training.entropy.reward_gradient import reward_gradient
from rl_training.parallel.ranks import Ranks
from rl_training.policy.scores import Scores
from rl_training.probes import (
    GradientNoiseScaleProbe,
    InterventionsProbe,
    MeasuredStepProbe,
    SamplerProbe,
    SimpleEntropyProbe,
)
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import NO_COPIES, Copies
from rl_training.step.loss_weights import LossWeights, gradient_of
from rl_training.step.needs import Need
from rl_training.step.reasons import NO_OTHERS, Reasons

STEP = FEW | {"max_steps": 2}  # two microbatches of one prompt with 4 responses
G = 4
WIDER: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "max_completion_length": 8}


class BothGradients(Seen):
    """Keeps the package's reward gradient, and one computed by hand from the rewards."""

    needs = Need.FOLD_GRADIENTS | Need.TERMS_CHECK

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        reading = super().measure(ctx, state)
        self.found, self.reason = reward_gradient(step, ctx.ranks)
        rollout = step.batch.rollout
        params = [p for p in ctx.policy.model.parameters() if p.requires_grad]
        fresh = ctx.policy.score(rollout, torch.arange(rollout.num_sequences))
        above = above_the_others(rollout.rewards, G)
        total = (above.unsqueeze(1) * fresh.logps.double() * fresh.mask).sum() / (~rollout.rewards.isnan()).sum()
        self.by_hand = joined(torch.autograd.grad(total, params))
        if isinstance(self.found, float):
            self.gradient = self.found * joined([p.grad for p in params])
        elif self.found is not None:
            fresh = ctx.policy.score(rollout, torch.arange(rollout.num_sequences))
            weights = self.found.of_rows(torch.arange(rollout.num_sequences), fresh.logps.shape[1])
            self.gradient = joined(gradient_of(fresh, weights.logps, None, params))
        return reading


def joined(gradients: Any) -> Tensor:
    return torch.cat([gradient.double().flatten() for gradient in gradients])


def found_by(trainer: Any) -> list[BothGradients]:
    """Train, and return the gradients of each step."""
    steps = []

    class Each(BothGradients):
        def measure(self, ctx: Any, state: Any) -> Reading:
            once = BothGradients()
            steps.append(once)
            return once.measure(ctx, state)

    with attach(trainer, probes=[Each()], whole_prompts=True):
        trainer.train()
    return steps


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("plain", ""), ("longer", ""),
        ("gmpo", "other_loss"), ("psr", "other_loss"), ("none", "other_loss"), ("sft", "other_terms"),
    ],
)  # fmt: skip
def test_the_reward_gradient_does_not_depend_on_how_the_loss_uses_rewards(
    make_trainer: Any, kind: str, code: str
) -> None:
    """Dr-GRPO with a changing maximum length; another loss; other advantages; missing rewards; an extra term."""
    classes = {"gmpo": GMPOTrainer, "psr": PositiveSamples, "sft": WithSupervision}
    more: dict[str, Any] = {"per_device_train_batch_size": 16, "max_completion_length": 16}
    settings_of_kind = more | {"config_class": GMPOConfig} if kind == "gmpo" else {}
    settings_of_kind |= more | {"reward": some_rewards} if kind == "none" else {}
    trainer = make_trainer(classes.get(kind, GRPOTrainer), **PLAIN | STEP | settings_of_kind)
    if kind == "longer":
        trainer.add_callback(Longer(trainer))
    for step in found_by(trainer):
        assert (step.reason.code if code else step.reason) == (code or None)
        assert isinstance(step.found, LossWeights if code else float)
        assert float(step.by_hand.norm()) > 1e-2
        assert float((step.gradient - step.by_hand).norm() / step.by_hand.norm()) < 1e-3


def test_the_factor_of_the_reward_gradient_uses_the_maximum_length_at_that_step(make_trainer: Any) -> None:
    """The factor is −L G/(G−1), with the maximum length L at that step."""
    trainer = make_trainer(GRPOTrainer, **PLAIN | STEP)
    trainer.add_callback(Longer(trainer))
    assert [step.found for step in found_by(trainer)] == pytest.approx([-8 * 4 / 3, -16 * 4 / 3], rel=1e-5)


def test_there_is_no_reward_gradient_where_each_prompt_has_one_rewarded_response(make_trainer: Any) -> None:
    def first_alone(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [1.0 if row % G == 0 else None for row in range(len(completions))]

    trainer = make_trainer(GRPOTrainer, **PLAIN | STEP | {"reward": first_alone})
    probe = SimpleEntropyProbe(per_sequence=True)
    with attach(trainer, probes=[probe], whole_prompts=True) as attached:
        trainer.train()
    assert attached.latest["delta_reward/forward"].reason == NO_OTHERS


def test_the_measured_reward_change_ignores_responses_without_a_reward(make_trainer: Any) -> None:
    """Missing rewards are nan and must not enter a mean, or the change would be nan, "not a finite number"."""
    probe, seen = MeasuredStepProbe(responses_per_prompt=G), Seen()
    trainer = make_trainer(GRPOTrainer, **PLAIN | STEP | {"reward": some_rewards, "per_device_train_batch_size": 16})
    with attach(trainer, probes=[probe, seen], whole_prompts=True) as attached:
        trainer.train()
    rollout = seen.kept_steps[-1].batch.rollout
    assert 0.1 < float(rollout.rewards.isnan().float().mean()) < 0.7
    weights = attached.latest["measured/delta_reward"]
    assert weights.value != 0.0
    assert math.isfinite(weights.stderr)


def whitened(completions: list[str], **kwargs: Any) -> list[float]:
    rewards = graded(completions)
    means = [sum(rewards[i // G * G : i // G * G + G]) / G for i in range(len(rewards))]
    return [reward - mean for reward, mean in zip(rewards, means, strict=True)]


def test_no_step_changes_the_mean_of_rewards_relative_to_their_group(make_trainer: Any) -> None:
    names = ("delta_reward/forward", "measured/delta_reward", "intervention/lr/delta_reward", "sampler/reward_gap")
    for reward, code in ((whitened, "relative_rewards"), (graded, "")):
        trainer = make_trainer(GRPOTrainer, **PLAIN | WIDER | {"max_steps": 2, "reward": reward})
        probes = [SimpleEntropyProbe(per_sequence=True), MeasuredStepProbe(), InterventionsProbe(["lr"], every=1)]
        with attach(trainer, probes=[*probes, SamplerProbe()], whole_prompts=True) as attached:
            trainer.train()
        assert {attached.latest[name].code for name in names} == {code}
        assert all(math.isfinite(attached.latest[name].value) == (not code) for name in names)
        assert math.isfinite(attached.latest["measured/delta_h"].value)


def rewarded(groups: list[list[float]], untested: bool = False) -> Any:
    rewards = torch.tensor([reward for group in groups for reward in group])
    index = torch.arange(len(groups)).repeat_interleave(len(groups[0]))
    return SimpleNamespace(rewards=rewards, prompt_index=index, untested=untested)


def test_equal_means_of_few_discrete_rewards_are_chance_until_they_repeat() -> None:
    """Of ten groups with one right response of two each, chance is at most .5^9 = 1/512 a step, and 1/512² < 1e-5."""
    check, alike = RewardCheck(), rewarded([[0.0, 1.0]] * 10)
    assert [check.check(alike, ALONE) is None for _ in range(3)] == [True, True, False]
    assert check.check(rewarded([[0.0, 1.0]] * 9 + [[1.0, 1.0]]), ALONE) is None  # one other mean, and it starts over
    assert check.check(alike, ALONE) is None
    flat = rewarded([[1.0, 1.0]] * 10)
    assert all(RewardCheck().check(flat, ALONE) is None for _ in range(5))  # no reward differs within its group


def test_groups_chosen_by_their_rewards_are_no_evidence_on_any_process() -> None:
    groups = [[0.0, 1.0]] * 24  # those with equal rewards were left out, so all means are 1/2

    def reason(rank: int, reduce: Callable[[Tensor], Tensor]) -> Unavailable | None:
        return RewardCheck().check(rewarded(groups, untested=rank == 1), Ranks(2, reduce, rank))

    assert on_two_ranks(reason) == [None, None]
    assert RewardCheck().check(rewarded(groups), ALONE) is RELATIVE_REWARDS


@pytest.mark.parametrize("again", ["reused", "copied_groups"])
def test_groups_that_are_there_again_are_no_further_evidence(again: str) -> None:
    checks, reason, rollout = StepChecks(), Unavailable(again, "there again"), rewarded([[0.0, 1.0]] * 10)
    alike: Any = SimpleNamespace(rollout=rollout, copies=NO_COPIES)
    copied: Any = SimpleNamespace(rollout=rollout, copies=Copies(reason=reason))
    repeated = (copied, Reasons()) if again == "copied_groups" else (alike, Reasons(reused=reason))
    assert [checks.relative_rewards(*repeated, ALONE) for _ in range(5)] == [None] * 5
    fresh = [checks.relative_rewards(alike, Reasons(), ALONE) is None for _ in range(3)]
    assert fresh == [True, True, False]
    assert checks.relative_rewards(*repeated, ALONE) is RELATIVE_REWARDS  # as known from before


def test_groups_on_two_processes_are_compared_with_each_other() -> None:
    draw = torch.Generator().manual_seed(0)
    rewards = torch.randn(2, 6, 4, generator=draw)
    rewards = rewards - rewards.mean(dim=2, keepdim=True)

    def reasons(rank: int, reduce: Callable[[Tensor], Tensor]) -> list[Unavailable | None]:
        shifted = rewards[rank] + float(rank)  # the same mean within each process only
        parts = [rewarded(values.tolist()) for values in (rewards[rank], shifted)]
        return [RewardCheck().check(part, Ranks(2, reduce, rank)) for part in parts]

    assert on_two_ranks(reasons) == [[RELATIVE_REWARDS, None]] * 2


def test_reward_weights_on_two_processes_count_all_responses_with_a_reward() -> None:
    """(r − mean) n/(n−1), over six rewards of which one is alone. Times two, for a mean over two processes."""
    rewards = torch.tensor([[1.0, 0.0, math.nan, 2.0], [3.0, 1.0, 2.0, math.nan]])
    prompts = torch.tensor([[0, 0, 0, 1], [5, 5, 5, 5]])

    def weights(rank: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        ones = torch.ones(4, 1)
        rollout = SimpleNamespace(
            rewards=rewards[rank], prompt_index=prompts[rank], completion_mask=ones, sampling_logps=None, on_policy=True
        )
        scores, zeros = Scores(ones, ones, ones), torch.zeros_like(ones)
        batch = SimpleNamespace(rollout=rollout, scores=scores, log_ratios=lambda: zeros)
        step: Any = SimpleNamespace(batch=batch, reasons=Reasons(other_terms=OTHER_TERMS))
        weights, _ = reward_gradient(step, Ranks(2, reduce, rank))
        assert isinstance(weights, LossWeights)
        return weights.logps.flatten()

    first, other = on_two_ranks(weights)
    assert (6 / 2 * first).tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0])
    assert (6 / 2 * other).tolist() == pytest.approx([1.5, -1.5, 0.0, 0.0])


def test_a_supervised_term_does_not_enter_the_reward_gradient_of_interventions(make_trainer: Any) -> None:
    """Halving the learning rate changes the reward by about the same amount with and without the term.

    As a multiple of the step's gradient, the reward gradient would include the term, and the change would be a hundred
    times as large.
    """
    estimates = {}
    for trainer_class in (GRPOTrainer, WithSupervision):
        probes = [SimpleEntropyProbe(per_sequence=True), InterventionsProbe(["lr"], every=1)]
        trainer = make_trainer(trainer_class, **PLAIN | WIDER | {"max_steps": 1, "learning_rate": 1e-4})
        with attach(trainer, probes=probes, whole_prompts=True) as attachment:
            trainer.train()
        estimates[trainer_class] = attachment.latest
    with_term = estimates[WithSupervision]
    assert math.isnan(with_term["delta_reward/forward"].value)
    assert with_term["delta_reward/forward"].code == "other_terms"
    lr = [answer["intervention/lr/delta_reward"] for answer in estimates.values()]
    assert abs(lr[1].value) < 3 * (abs(lr[0].value) + lr[0].stderr)
    assert math.isfinite(estimates[GRPOTrainer]["delta_reward/forward"].value)


def test_the_split_of_the_noise_is_missing_where_the_loss_is_not_the_plain_one(make_trainer: Any) -> None:
    for trainer_class, is_there in ((GRPOTrainer, True), (WithSupervision, False), (PositiveSamples, False)):
        probe = GradientNoiseScaleProbe(split_prompts=1)
        trainer = make_trainer(trainer_class, **PLAIN | STEP | {"max_steps": 1})
        with attach(trainer, probes=[probe], whole_prompts=True) as attached:
            trainer.train()
        answer = attached.latest["gns/trace_between"]
        assert (answer.code in ("other_loss", "other_terms")) != is_there

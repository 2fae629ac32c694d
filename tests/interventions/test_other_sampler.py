"""Predictions of interventions if another policy sampled: the reward gradient, and comparison with the actual step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_steps import scored
from other_samplers import OtherSampler
from two_turns import LOGITS, OUTCOMES, REWARDS, policy_logp, tables

from rl_training.entropy.reward_gradient import reward_gradient
from rl_training.hosts.plain.measured_loop import FIXES
from rl_training.models.load import load_tiny
from rl_training.parallel.ranks import all_ranks
from rl_training.policy.scores import Scores
from rl_training.probes import InterventionsProbe, SimpleEntropyProbe
from rl_training.step.loss_weights import LossWeights
from rl_training.step.reasons import Reasons

SAMPLER = [[x + 0.5 * math.sin(7 * i + 3 * j + 1) for j, x in enumerate(row)] for i, row in enumerate(LOGITS)]


def test_the_reward_gradient_is_exact_in_the_mean_over_groups_of_another_sampler() -> None:
    """Averages over all groups of two responses, weighted by the sampler's probability of drawing them."""
    pairs = list(itertools.product(range(len(OUTCOMES)), repeat=2))
    drawn = torch.tensor(pairs).flatten()
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logps, entropies, mask = tables(drawn, logits)
    rollout = SimpleNamespace(
        on_policy=True,
        has_unknown_sampler=False,
        sampling_logps=tables(drawn, torch.tensor(SAMPLER, dtype=torch.float64))[0],
        rewards=REWARDS[drawn].double(),
        prompt_index=torch.arange(len(pairs)).repeat_interleave(2),
    )
    scores = Scores(logps.detach(), entropies.detach(), mask)
    nothing = LossWeights(torch.zeros_like(scores.logps), None)
    batch = scored(rollout, scores, nothing)
    step: Any = SimpleNamespace(batch=batch, reasons=Reasons(), fixes=FIXES)
    weights, _ = reward_gradient(step, all_ranks())
    assert isinstance(weights, LossWeights)
    chance = [
        math.prod(OUTCOMES[o].chance * math.exp(policy_logp(OUTCOMES[o], SAMPLER)) for o in pair) for pair in pairs
    ]
    of_sequence = torch.tensor(chance, dtype=torch.float64).repeat_interleave(2) / 2 * len(drawn)
    surrogate = (of_sequence.unsqueeze(1) * weights.logps * logps.masked_fill(mask == 0, 0.0)).sum()
    gradient = torch.autograd.grad(surrogate, logits, retain_graph=True)[0]
    every = torch.arange(len(OUTCOMES))
    joined = tables(every, logits)
    by_environment = torch.tensor([o.chance for o in OUTCOMES], dtype=torch.float64)
    reward = (by_environment * joined[0].masked_fill(joined[2] == 0, 0.0).sum(dim=1).exp() * REWARDS).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(reward, logits)[0], rtol=0, atol=1e-12)


def test_effects_of_corrections_are_relative_to_the_step_taken(make_trainer: Callable[..., Any]) -> None:
    """The loss corrects nothing, so `none` is the step itself, and halving the rate changes it by minus one half."""
    probe = InterventionsProbe(["none", "tis:1.001", "lr:0.5"], every=1, num_folds=4)
    simple = SimpleEntropyProbe(num_folds=4)
    stale = OtherSampler("stale", dict(load_tiny()[0].named_parameters()))
    settings = {"trainer_arguments": {"rollout_func": stale}, "learning_rate": 1e-3, "max_steps": 3}
    trainer = make_trainer(probes=[simple, probe], **settings)
    trainer.train()
    estimates = trainer.attachment.latest
    forward = estimates["delta_h/forward"].value
    assert estimates["intervention/plain_delta_h"].value == pytest.approx(forward, rel=1e-4)
    assert estimates["intervention/lr:0.5/delta_h"].value == pytest.approx(-0.5 * forward, rel=1e-3)
    assert abs(estimates["intervention/none/delta_h"].value) < 1e-6 * abs(forward)
    assert 1e-6 * abs(forward) < abs(estimates["intervention/tis:1.001/delta_h"].value) < abs(forward)
    assert math.isfinite(estimates["intervention/tis:1.001/delta_reward"].value)

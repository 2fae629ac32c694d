"""The covariance predictor: an exact derivative in the case it is derived for, and its plain definition in a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from seen import Kept
from trainers import FEW, trainer_maker

from rl_training import Reading
from rl_training.engine.context import StepContext
from rl_training.policy.scores import Scores
from rl_training.probes import CovariancePredictorProbe
from rl_training.probes.advantage_covariance import covariance_terms, minus_covariance
from rl_training.step.data import StepData

NAMES = ("covariance/token", "covariance/sequence")


class Answers(Kept, CovariancePredictorProbe):
    """The covariance probe, which keeps its estimates and steps. Padding is nan."""

    def measure(self, ctx: StepContext, state: Any) -> Reading:
        step = ctx.step
        scores = step.batch.scores
        padded = dataclasses.replace(scores, logps=scores.logps.masked_fill(scores.mask == 0, torch.nan))
        step = dataclasses.replace(step, batch=dataclasses.replace(step.batch, scores=padded))
        return super().measure(dataclasses.replace(ctx, step=step), state)


def plain(step: StepData, rows: list[int]) -> list[float]:
    """Return −Cov over these sequences, per token and per sequence, computed one value at a time."""
    tokens, sequences = [], []
    for i in rows:
        logps = step.batch.scores.logps[i][step.batch.scores.mask[i].bool()].double().tolist()
        advantage = float(step.batch.rollout.advantages[i])
        tokens += [(x, advantage) for x in logps]
        sequences.append((sum(logps), advantage))
    return [-float(torch.tensor(pairs, dtype=torch.float64).T.cov(correction=0)[0, 1]) for pairs in (tokens, sequences)]


def test_the_covariance_is_the_entropy_derivative_along_a_softmaxs_natural_gradient() -> None:
    """Eight one-token responses occur exactly as often as the policy says, so the batch is the population."""
    counts = torch.tensor([4, 2, 1, 1])
    logits = (counts / 8).double().log().requires_grad_()
    gain = torch.tensor([0.7, -0.2, -1.0, 0.1], dtype=torch.float64)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    (slope,) = torch.autograd.grad(entropy, logits)
    actions = torch.repeat_interleave(torch.arange(4), counts)
    logps = logits.detach()[actions].unsqueeze(1)
    scores = Scores(logps, torch.zeros_like(logps), torch.ones_like(logps))
    covariance = minus_covariance(covariance_terms(scores, gain[actions]).sum(dim=0))
    torch.testing.assert_close(covariance, (slope @ gain).expand(2))
    assert float(covariance[0]) < 0  # the likely action is rewarded


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    probe = Answers()
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    trainer_maker(tmp_path_factory.mktemp("trained"))(probes=[probe], **settings).train()
    return probe


def test_the_covariance_is_centred_over_the_whole_batch(answers: Answers) -> None:
    for step, answer in zip(answers.kept_steps, answers.all, strict=True):
        values = [answer[name].value for name in NAMES]
        assert values == pytest.approx(plain(step, list(range(32))), rel=1e-6)
        per_microbatch = [plain(step, list(rows)) for rows in step.batch.microbatch_rows]
        centred_within = sum(of_tokens for of_tokens, _ in per_microbatch) / len(per_microbatch)
        assert centred_within != pytest.approx(values[0], rel=1e-2)


def test_the_error_is_the_jackknife_over_folds(answers: Answers) -> None:
    step, answer = answers.kept_steps[-1], answers.all[-1]
    folds = step.batch.fold.tolist()
    assert len(set(folds)) == 8
    without = torch.tensor([plain(step, [i for i in range(32) if folds[i] != k]) for k in range(8)])
    expected = (7 / 8 * (without - without.mean(dim=0)).square().sum(dim=0)).sqrt()
    assert [answer[name].stderr for name in NAMES] == pytest.approx(expected.tolist(), rel=1e-5)


def test_folds_that_split_prompts_give_a_value_without_an_error(answers: Answers) -> None:
    ctx, probe = answers.contexts[-1], CovariancePredictorProbe()
    spread = dataclasses.replace(ctx.step.reasons, split_prompts="spread")
    reading = probe.measure(dataclasses.replace(ctx, step=dataclasses.replace(ctx.step, reasons=spread)), None)
    for name in NAMES:
        estimate = reading.estimates[name]
        assert estimate.value == answers.all[-1][name].value
        assert math.isnan(estimate.stderr)
        assert estimate.reason == "spread"


def test_few_folds_give_a_value_without_an_error(make_trainer: Callable[..., Any]) -> None:
    probe = Answers()
    make_trainer(probes=[probe], max_steps=1, **FEW).train()
    assert {probe.all[0][name].code for name in NAMES} == {"few_folds"}
    assert all(math.isnan(probe.all[0][name].stderr) for name in NAMES)

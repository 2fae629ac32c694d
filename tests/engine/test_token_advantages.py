"""Per-token advantages, (B, T), as a subclass may pass them to TRL's loss: measured exactly, or missing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from own_losses import PLAIN
from seen import Seen
from torch import Tensor
from trainers import differing, graded, outcome
from trl import GRPOTrainer

from rl_training import Rollout, attach
from rl_training.hosts.trl.rollouts import batches
from rl_training.interventions.loss import LossInputs, zero_advantage_share
from rl_training.interventions.named import INTERVENTIONS
from rl_training.policy.rollout import join_rollouts, with_one_advantage_each
from rl_training.policy.scores import Scores
from rl_training.probes import (
    CovariancePredictorProbe,
    EffectiveSampleSizeProbe,
    InterventionsProbe,
    MeasuredStepProbe,
    SimpleEntropyProbe,
    TokenClassesProbe,
)
from rl_training.probes.advantage_covariance import covariance_terms, minus_covariance
from rl_training.step.loss_weights import LossWeights

STEP: dict[str, Any] = PLAIN | {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_completion_length": 8, "reward": graded,
    "max_steps": 2,
}  # fmt: skip


class OfTokens(GRPOTrainer):
    """Discounts the advantages of later tokens, and flips the sign in the second half of a response."""

    decay = 0.9

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        out["advantages"] = out["advantages"].unsqueeze(1) * self.factors(out["completion_ids"].shape[1])
        return out

    def factors(self, width: int) -> Tensor:
        places = torch.arange(width)
        return self.decay**places * torch.where(places < 4, 1.0, -1.0)


def probes() -> list[Any]:
    return [
        SimpleEntropyProbe(per_sequence=True), EffectiveSampleSizeProbe(), CovariancePredictorProbe(),
        MeasuredStepProbe(), InterventionsProbe(["psr", "nsr", "w_reinforce:0.5", "lr"], every=1),
        TokenClassesProbe(every=1),
    ]  # fmt: skip


def measured(trainer: Any) -> tuple[dict[str, Any], Any]:
    seen = Seen()
    with attach(trainer, probes=[*probes(), seen], whole_prompts=True) as attachment:
        trainer.train()
    return dict(attachment.latest), seen.kept_steps[-1]


def test_every_probe_measures_a_step_with_token_level_advantages(make_trainer: Any) -> None:
    estimates, step = measured(make_trainer(OfTokens, **STEP))
    mask = step.batch.rollout.completion_mask.double()
    sizes = (step.batch.rollout.token_advantages.double().abs() * mask).sum(dim=1)
    for name, weights in {"ess/token_weight": sizes, "ess/advantage": sizes / mask.sum(dim=1)}.items():
        assert estimates[name].value == pytest.approx(float(weights.sum() ** 2 / weights.square().sum()), rel=1e-6)
    assert estimates["delta_reward/forward"].code == "other_loss"
    for name in ("delta_h/forward", "intervention/psr/delta_h", "intervention/psr/delta_reward", "covariance/token"):
        assert math.isfinite(estimates[name].value), name
    # Positive tokens and negative tokens together make up the whole loss.
    both = estimates["intervention/psr/delta_h"].value, estimates["intervention/nsr/delta_h"].value
    assert both[0] != 0.0
    assert both[1] != 0.0
    shares = [estimates[f"tokens/advantage/{sign}/share_of_tokens"].value for sign in ("positive", "negative", "zero")]
    assert min(shares[:2]) > 0.1
    assert sum(shares) == pytest.approx(1.0)


def test_equal_advantages_on_all_tokens_are_response_level_advantages(make_trainer: Any) -> None:
    class Repeated(OfTokens):
        def factors(self, width: int) -> Tensor:
            return torch.ones(width)

    plain, repeated = (measured(make_trainer(kind, **STEP | {"max_steps": 1}))[0] for kind in (GRPOTrainer, Repeated))
    assert plain.keys() == repeated.keys()
    for name, estimate in plain.items():
        if not name.startswith("probe_cost"):
            assert repr(repeated[name]) == repr(estimate), name


def test_training_with_token_advantages_and_probes_is_bitwise_training_without_probes(make_trainer: Any) -> None:
    bare = outcome(make_trainer(OfTokens, **STEP))
    with attach(probed := make_trainer(OfTokens, **STEP), probes=probes(), whole_prompts=False):
        assert differing(outcome(probed), bare) == []


# --- by hand ----------------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
ADVANTAGES = torch.tensor([[2.0, -1.0, 9.0], [-3.0, 0.0, 6.0]])  # the first response has only two tokens


def rollout(advantages: Tensor) -> Rollout:
    ids = torch.ones_like(MASK)
    return Rollout(ids, ids, ids, MASK, advantages, None, torch.tensor([0, 0]))


def loss_inputs() -> LossInputs:
    single = with_one_advantage_each(rollout(ADVANTAGES))
    nothing = torch.zeros(2, 3)
    return LossInputs(
        weights=LossWeights(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), None),
        scores=Scores(nothing, nothing, MASK), advantages=single.advantages, prompt_index=single.prompt_index,
        token_advantages=single.token_advantages,
    )  # fmt: skip


def test_the_advantage_of_a_response_is_the_mean_over_its_tokens() -> None:
    single = with_one_advantage_each(rollout(ADVANTAGES))
    assert single.advantages.tolist() == [0.5, 1.0]
    assert single.token_advantages.tolist() == [[2.0, -1.0, 0.0], [-3.0, 0.0, 6.0]]
    joined = join_rollouts([rollout(torch.tensor([7.0, 8.0])), single])
    assert joined.token_advantages.tolist()[:2] == [[7.0] * 3, [8.0] * 3]
    assert joined.advantages.tolist() == [7.0, 8.0, 0.5, 1.0]


def test_a_response_masked_by_the_loss_has_no_advantage_on_any_token() -> None:
    ids, hidden = torch.ones_like(MASK), torch.tensor([[0, 0, 0], [1, 1, 1]])
    names = ("prompt_ids", "prompt_mask", "completion_ids")
    inputs = {**dict.fromkeys(names, ids), "completion_mask": hidden, "advantages": ADVANTAGES}
    single = batches.read_rollout(inputs, first_prompt=0, on_policy=True, pad_token_id=0)
    assert single.completion_mask.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert single.token_advantages.tolist() == [[0.0, 0.0, 0.0], [-3.0, 0.0, 6.0]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("psr", [[1.0, 0.0, 0.0], [0.0, 0.0, 6.0]]),
        ("nsr", [[0.0, 2.0, 0.0], [4.0, 0.0, 0.0]]),
        ("w_reinforce", [[0.1, 2.0, 3.0], [4.0, 5.0, 0.6]]),
    ],
)
def test_interventions_use_the_sign_of_each_tokens_advantage(name: str, expected: Any) -> None:
    weights = INTERVENTIONS[name].weights(loss_inputs()).logps
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_a_prompt_is_silent_where_no_token_of_its_responses_has_an_advantage() -> None:
    advantages = torch.tensor([[1.0, -1.0], [0.0, 0.0], [0.0, 0.0]])  # the first has mean 0 but is not silent
    assert zero_advantage_share(advantages, torch.tensor([1, 2, 3]), torch.clone) == pytest.approx(2 / 3)


def test_the_covariance_uses_the_advantage_of_each_token() -> None:
    """Tokens (log π, A): (−1, 2), (−3, −1), (−2, −3), (0, 0), (−4, 6); sequences (−4, ½), (−6, 1)."""
    logps = torch.tensor([[-1.0, -3.0, 5.0], [-2.0, 0.0, -4.0]])
    pairs = [(-1, 2), (-3, -1), (-2, -3), (0, 0), (-4, 6)]
    mean = [sum(pair[i] for pair in pairs) / 5 for i in range(2)]
    by_hand = -sum((x - mean[0]) * (y - mean[1]) for x, y in pairs) / 5
    terms = covariance_terms(Scores(logps, torch.zeros(2, 3), MASK), ADVANTAGES)
    covariance = minus_covariance(terms.sum(dim=0))
    assert covariance.tolist() == pytest.approx([by_hand, 0.25])

"""Steps that learn from responses again: what no step since the rollout has learned from a fold is carried along."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simple_twin import Answers, Recorder, Snapshot, Twin, per_sequence, per_token
from test_simple_probe import SMOOTH, K
from torch import Tensor
from trainers import FEW, graded, trainer_maker

from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.folds import leave_fold_out
from rl_training.mathematics.sgd import SGDState
from rl_training.probes import ResponsesProbe

# --- the optimizers' own rule for their moments -----------------------------------------------------------------------


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        (
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3),
            AdamWState(torch.zeros(5), torch.zeros(5), 0, 0.1, (0.9, 0.999), 1e-8, 0.3),
        ),
        (
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.7), weight_decay=0.3),
            AdamWState(torch.zeros(5), torch.zeros(5), 0, 0.1, (0.5, 0.7), 1e-8, 0.3, decoupled=False),
        ),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.3, weight_decay=0.3),
            SGDState(None, 0.1, 0.8, 0.3, 0.3, nesterov=False),
        ),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
            SGDState(None, 0.1, 0.8, 0.0, 0.0, nesterov=True),
        ),
        (lambda p: torch.optim.SGD(p, lr=0.1), SGDState(None, 0.1, 0.0, 0.0, 0.0, nesterov=False)),
    ],
    ids=["AdamW", "Adam", "SGD", "Nesterov", "plain SGD"],
)
def test_a_state_goes_through_three_steps_as_torchs_optimizer_does(optimizer: Any, state: Any) -> None:
    param = torch.nn.Parameter(draw(5))
    torchs = optimizer([param])
    for seed in (1, 2, 3):
        before, grad = param.detach().clone(), draw(5, seed=seed)
        param.grad = grad.clone()
        torchs.step()
        torch.testing.assert_close(param.detach() - before, state.delta(before, grad).total)
        state = state.after(before, grad)
    for name, tensor in torchs.state[param].items():
        if isinstance(tensor, Tensor):
            torch.testing.assert_close(torch.as_tensor(getattr(state, name)).to(tensor), tensor)


# --- a policy that is enumerated --------------------------------------------------------------------------------------

THETA, GROUP, FOLDS = 1.5, 2, 2  # one token, 0 or 1, with log-odds THETA; a prompt of two responses in each fold


def policy(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Returns π(1) and ∂H of a Bernoulli policy."""
    p = torch.sigmoid(theta)
    return p, -theta * p * (1 - p)


def outcomes() -> tuple[Tensor, Tensor]:
    """Returns every batch, (n, folds, group), and its probability, (n,)."""
    batches = torch.tensor(list(itertools.product((0.0, 1.0), repeat=FOLDS * GROUP)), dtype=torch.float64)
    p = torch.sigmoid(torch.tensor(THETA, dtype=torch.float64))
    chance = torch.where(batches == 1, p, 1 - p).prod(dim=1)
    return batches.unflatten(1, (FOLDS, GROUP)), chance


def entropy_gradient(batch: Tensor, theta: Tensor) -> Tensor:
    """Returns the score estimate of ∂H by fold, (n, folds), weighted by π_θ / π_THETA, its baseline the entropy."""
    p, _ = policy(theta.view(-1, 1, 1))
    p0 = torch.sigmoid(torch.tensor(THETA, dtype=torch.float64))
    chance, chance0 = (torch.where(batch == 1, q, 1 - q) for q in (p, p0))
    entropy = -(p * p.log() + (1 - p) * (1 - p).log())
    return (chance / chance0 * (-chance.log() - entropy) * (batch - p)).mean(dim=2)


def training_gradient(batch: Tensor, theta: Tensor) -> Tensor:
    """Returns −mean A π_θ/π_THETA ∂log π by fold, (n, folds); the reward is the token, the advantage its deviation."""
    p, _ = policy(theta.view(-1, 1, 1))
    p0 = torch.sigmoid(torch.tensor(THETA, dtype=torch.float64))
    ratio = torch.where(batch == 1, p / p0, (1 - p) / (1 - p0))
    advantage = batch - batch.mean(dim=2, keepdim=True)
    return -(advantage * ratio * (batch - p)).mean(dim=2)


def adam(step: int, exp_avg_sq: float, learning_rate: float) -> AdamWState:
    moments = torch.tensor([0.02], dtype=torch.float64), torch.tensor([exp_avg_sq], dtype=torch.float64)
    return AdamWState(*moments, step, learning_rate, (0.9, 0.95), 1e-2, 0.0)


def sgd(learning_rate: float) -> SGDState:
    return SGDState(torch.tensor([0.02], dtype=torch.float64), learning_rate, 0.9, 0.0, 0.0, nesterov=False)


def biases(state: Any, learning_rate_before: float) -> tuple[float, float]:
    """Returns, relative to E[∂H·δθ] for independent prompts, the bias of the second step's forward: as it is measured,
    and with the optimizer's own moments, which have seen the fold.

    learning_rate_before  of the first step, whose responses the second one learns from again
    """
    batch, chance = outcomes()
    theta = torch.full((len(batch),), THETA, dtype=torch.float64)
    gradients = training_gradient(batch, theta)
    mean, sizes = gradients.mean(dim=1), torch.full((FOLDS,), float(GROUP))

    def without(folds: Tensor) -> Tensor:
        return torch.stack([leave_fold_out(f.mean(), f, sizes, FOLDS * GROUP) for f in folds])

    first = dataclasses.replace(state, lr=learning_rate_before)
    now = theta + first.delta(theta, mean).total
    seen = dataclasses.replace(first.after(theta, mean), lr=state.lr)
    never_saw = dataclasses.replace(first.after(theta.unsqueeze(1), without(gradients)), lr=state.lr)
    x, left = entropy_gradient(batch, now), without(training_gradient(batch, now))
    of_each = [s.delta(now.unsqueeze(1), left).total for s in (never_saw, _per_fold(seen))]
    _, truth_x = policy(now)
    truth = float(chance @ (truth_x.unsqueeze(1) * of_each[0]).mean(dim=1))
    measured, plain = (float(chance @ (x * step).mean(dim=1)) for step in of_each)
    return measured / truth - 1, plain / truth - 1


def _per_fold(state: Any) -> Any:
    """The same moments for each fold."""
    return dataclasses.replace(state, **{n: t.unsqueeze(1) for n, t in vars(state).items() if isinstance(t, Tensor)})


OPTIMIZERS = {"SGD": sgd(0.1), "cold Adam": adam(0, 0.0, 0.1), "warm Adam": adam(30, 0.01, 0.1)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_at_the_parameters_of_the_rollout_a_second_step_is_predicted_without_bias(name: str) -> None:
    """The first step has fed the moments and not moved the parameters: all of the bias was the momentum's."""
    measured, plain = biases(OPTIMIZERS[name], learning_rate_before=0.0)
    assert abs(measured) < 1e-9
    assert abs(plain) > 0.3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_bias_remains_vanishes_with_the_learning_rate_and_that_of_the_momentum_does_not(name: str) -> None:
    large, small = (biases(OPTIMIZERS[name], learning_rate_before=rate) for rate in (0.03, 0.003))
    assert abs(small[0]) < 0.2 * abs(large[0])
    assert abs(small[1]) > 0.3


# --- the probe on a real trainer --------------------------------------------------------------------------------------


def followed(twins: list[Twin], blocks: list[int]) -> list[Tensor]:
    """Returns every step's δθ without each fold k of the last step, (K, P), from moments that none of them fed it.

    blocks  by step, which part of the rollout it learns from
    """
    moments, updates = twins[0].step.moments, []
    for twin, block in zip(twins, blocks, strict=True):
        whole = twin.mean(twin.gradients).expand_as(twin.gradients)
        gradients = twin.means_without(twin.gradients) if block == blocks[-1] else whole
        update, moments = twin.adamw(gradients, moments)
        updates.append(update)
    return updates


L_MAX = 12
SMALL = {  # eight folds, each of one prompt with two short responses
    "num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": K,
    "max_completion_length": L_MAX, "reward": graded,
}  # fmt: skip


def train_again(make: Callable[..., Any], **settings: Any) -> tuple[list[Snapshot], list[dict[str, Any]]]:
    """Returns the steps of a training that learns from every response twice, and what the probe said of them."""
    recorder, probe, responses = Recorder(), Answers(per_sequence=True, own_prompts=True), ResponsesProbe(1)
    settings = {"dtype": torch.float64, "num_iterations": 2, "max_steps": 3, "learning_rate": 2e-4, **settings}
    make(probes=[probe, responses, recorder], **settings, **SMALL, **SMOOTH).train()
    return recorder.steps, probe.all


@pytest.fixture(scope="module")
def one_step_a_rollout(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Snapshot], list[dict[str, Any]]]:
    return train_again(trainer_maker(tmp_path_factory.mktemp("trained")))


def assert_equals_the_twin_that_never_saw_the_fold(steps: list[Snapshot], blocks: list[int], answer: Any) -> None:
    """What the probe said of the last of these steps; blocks: by step, which part of the rollout it learns from."""
    *earlier, latest = steps
    twins = [*(Twin(step, 1, max_length=L_MAX) for step in earlier)]
    twins.append(Twin(latest, 1, max_length=L_MAX, weighted=True))
    twin, same = twins[-1], {"rel": 1e-3, "abs": 1e-9}
    *_, last, now = followed(twins, blocks)
    for name, updates, whole in (("backward", last, twins[-2].update), ("forward", now, twin.update)):
        twin.update_without, twin.update = updates, whole
        for suffix, statistic in (("", per_token), ("_sequence", per_sequence)):
            value = twin.change(updates, statistic)
            assert answer[f"delta_h/{name}{suffix}"].value == pytest.approx(value, **same)
        assert answer[f"delta_h/{name}"].stderr == pytest.approx(twin.stderr(updates, per_token), rel=2e-3)
    parts = [answer[f"delta_h/part/{cause}"].value for cause in ("momentum", "gradient", "decay")]
    assert sum(parts) == pytest.approx(answer["delta_h/forward"].value, rel=1e-9)
    assert math.isfinite(answer["delta_h/cumulative_predicted"].value)
    assert "moments without each response" in answer["delta_h/own_prompts"].reason


def test_a_step_that_reuses_responses_equals_the_plain_twin_that_never_saw_the_fold(one_step_a_rollout) -> None:
    steps, answers = one_step_a_rollout
    assert_equals_the_twin_that_never_saw_the_fold(steps[:2], [0, 0], answers[1])


def test_so_it_does_when_another_part_of_the_rollout_came_between(make_trainer) -> None:
    steps, answers = train_again(make_trainer, steps_per_generation=2 * K)
    assert_equals_the_twin_that_never_saw_the_fold(steps, [0, 1, 0], answers[2])


def test_a_new_rollout_begins_with_the_optimizers_own_moments(one_step_a_rollout) -> None:
    """Rows are kept within a rollout only: the third step's forward is that of a step on fresh responses."""
    steps, answers = one_step_a_rollout
    twin = Twin(steps[2], responses=1, max_length=L_MAX)
    expected = twin.change(twin.update_without, per_token)
    assert answers[2]["delta_h/forward"].value == pytest.approx(expected, rel=1e-3)


def test_a_reused_response_is_noticed_where_a_step_since_its_first_use_was_not_measured(make_trainer) -> None:
    """Of rollouts that serve three steps each, steps 1, 3 and 5 are measured: the first two learn from one rollout, and
    between them is another step that does; before the last one comes the first use of its rollout."""
    probe = Answers(every=2)
    make_trainer(probes=[probe], max_steps=5, num_iterations=3, **FEW).train()
    first, *later = probe.all
    assert math.isfinite(first["delta_h/forward"].value)
    for answer in later:
        for name in ("forward", "backward", "part/momentum"):
            assert math.isnan(answer[f"delta_h/{name}"].value)
        assert "has trained on these responses" in answer["delta_h/forward"].reason
        assert math.isfinite(answer["delta_h/reuse"].value)

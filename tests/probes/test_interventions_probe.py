"""The interventions probe, compared with a slow twin that makes every step with torch's AdamW, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from example_steps import ALONE
from peft import LoraConfig
from seen import Kept
from simple_twin import Recorder, Twin
from torch import Tensor
from trainers import graded, trainer_maker
from trl import GRPOConfig, GRPOTrainer

from rl_training import Estimate, attach
from rl_training.entropy.changed_steps import changes_by_basis
from rl_training.interventions.named import GROWS, RATIOS_ARE_ONE, parse_intervention
from rl_training.optim.sgd import SGDState
from rl_training.optim.state import OptimizerView
from rl_training.parallel.state_tensors import from_tensors, to_tensors
from rl_training.probes import InterventionsProbe, SimpleEntropyProbe
from rl_training.probes.interventions import kept_halving
from rl_training.statistics.running_pairs import Pair

NUM_FOLDS, G, MICROBATCHES, L_MAX = 8, 4, 4, 24
WHICH = [
    "bonus:0.5",
    "bonus:0.05",
    "psr",
    "nsr",
    "w_reinforce:0.5",
    "lr:0.5",
    "lr:2",
    "max_grad_norm:0.05",
    "clip_cov:0.1",
    "kl_cov",
]


class Answers(Kept, InterventionsProbe):
    """The interventions probe, which keeps its estimates."""

    def __init__(self, which: Any = WHICH, num_folds: int | None = NUM_FOLDS, every: int = 1, **options: Any) -> None:
        super().__init__(which, every=every, num_folds=num_folds, **options)


class InterventionsTwin(Twin):
    """The interventions' effects at a step, with each δθ_(−k) recomputed by torch's AdamW in float64."""

    def gradients_with(self, name: str) -> Tensor:
        """Return the gradient of each fold under an intervention, (K, P)."""
        advantages = self.step.rollout.advantages.tolist()
        if name.startswith("bonus"):
            size = len(self.lengths) // MICROBATCHES
            tokens = [sum(self.lengths[size * (i // size) :][:size]) for i in range(len(self.lengths))]
            of = [self.gradient(self.entropies[i].sum()) / tokens[i] * size for i in range(len(tokens))]
            means = [torch.stack([of[i] for i in fold]).mean(dim=0) for fold in self.folds]
            return self.gradients - float(name[6:]) * torch.stack(means)
        if name.startswith("clip_cov"):
            return torch.stack([self.clipped_covariance(fold) for fold in self.folds])
        factor = {"psr": (1, 0), "nsr": (0, 1), "w_reinforce:0.5": (0.5, 1)}.get(name, (1, 1))
        factors = torch.tensor([factor[a < 0] for a in advantages]).double().unsqueeze(1)
        return torch.stack([(factors * self.d_loss)[fold].mean(dim=0) for fold in self.folds])

    def clipped_covariance(self, fold: list[int]) -> Tensor:
        """Return a fold's gradient without the tenth of its microbatch's tokens with the largest covariance."""
        size = len(self.lengths) // MICROBATCHES
        first = size * (fold[0] // size)
        advantages = self.step.rollout.advantages.tolist()
        tokens = [(i, t) for i in range(first, first + size) for t in range(int(self.lengths[i]))]
        mean_a = sum(advantages[i] for i, _ in tokens) / len(tokens)
        mean_l = sum(float(self.logps[i][t]) for i, t in tokens) / len(tokens)
        tokens.sort(key=lambda at: -(advantages[at[0]] - mean_a) * (float(self.logps[at[0]][at[1]]) - mean_l))
        kept = tokens[int(0.1 * len(tokens)) :]
        terms = [-advantages[i] * self.logps[i][t] for i, t in kept if i in fold]
        return self.gradient(sum(terms) / L_MAX) / len(fold)

    def steps_with(self, name: str, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the whole step, (P,), and the steps without each fold, (K, P)."""
        threshold = 0.05 if name.startswith("max_grad_norm") else None
        factor = float(name[3:]) if name.startswith("lr") else 1.0
        mean, without = self.mean(gradients), self.means_without(gradients)
        return tuple(factor * self.adamw(g, max_grad_norm=threshold) for g in (mean, without))

    def answers(self, name: str) -> dict[str, float]:
        """Return ΔH, Δreward and their delete-one-fold errors. For ΔH only X varies, for Δreward also the step."""
        whole, without = self.steps_with(name, self.gradients_with(name))
        whole, without = whole - self.update, without - self.update_without
        x = self.x[0] - self.level * self.x[1]
        j = -self.gradients * L_MAX * G / (G - 1)
        sizes = torch.tensor([len(fold) for fold in self.folds]).double()
        tokens = torch.tensor([sum(self.lengths[i] for i in fold) for fold in self.folds]).double()
        products_by_name = {}
        for quantity, direction, units in (("delta_h", x, tokens), ("delta_reward", j, sizes)):
            products = torch.linalg.vecdot(direction, without)  # X_k · Δ_(−k)
            products_by_name[quantity] = float(sizes @ products / units.sum())
            values = []
            for out in range(len(sizes)):
                kept = [k for k in range(len(sizes)) if k != out]
                moved = products if direction is x else products + direction @ (without[out] - whole)
                values.append(float(sizes[kept] @ moved[kept] / units[kept].sum()))
            mean = sum(values) / len(values)
            variance = (len(values) - 1) / len(values) * sum((v - mean) ** 2 for v in values)
            products_by_name[f"{quantity}_se"] = math.sqrt(variance)
        return products_by_name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, Recorder]:
    probe, recorder = Answers(), Recorder()
    make = trainer_maker(tmp_path_factory.mktemp("interventions"))
    make(
        probes=[probe, SimpleEntropyProbe(num_folds=NUM_FOLDS), recorder],
        reward=ones,
        max_steps=3,
        max_grad_norm=0.2,
        max_completion_length=L_MAX,
    ).train()
    return probe, recorder


def ones(completions: list[str], **kwargs: Any) -> list[float]:
    """Return rewards with which entropy certainly falls at the third step."""
    return [float(completion.count("1")) for completion in completions]


@pytest.fixture(scope="module")
def twin(run: tuple[Answers, Recorder]) -> InterventionsTwin:
    return InterventionsTwin(run[1].steps[-1], responses=1, max_length=L_MAX)


@pytest.mark.parametrize("name", [name for name in WHICH if name != "kl_cov"])
def test_an_effect_is_the_difference_of_the_twins_steps(run, twin: InterventionsTwin, name: str) -> None:
    answers, expected = run[0].all[-1], twin.answers(name)
    for quantity in ("delta_h", "delta_reward"):
        estimate = answers[f"intervention/{name}/{quantity}"]
        assert estimate.value == pytest.approx(expected[quantity], rel=1e-3, abs=1e-3 * estimate.stderr), quantity
        assert estimate.stderr == pytest.approx(expected[f"{quantity}_se"], rel=1e-3), quantity
        assert estimate.num_samples == NUM_FOLDS


def test_the_effect_of_the_plain_step_equals_the_twin(run: tuple[Answers, Recorder], twin: InterventionsTwin) -> None:
    answers = run[0].all[-1]
    x = twin.x[0] - twin.level * twin.x[1]
    sizes = torch.tensor([len(fold) for fold in twin.folds]).double()
    plain = float(sizes @ torch.linalg.vecdot(x, twin.update_without) / sum(twin.lengths))
    j = -twin.gradients * L_MAX * G / (G - 1)
    reward = float(sizes @ torch.linalg.vecdot(j, twin.update_without) / sizes.sum())
    assert plain < -0.005
    assert answers["intervention/plain_delta_h"].value == pytest.approx(plain, rel=1e-3)
    assert answers["intervention/plain_delta_reward"].value == pytest.approx(reward, rel=1e-3)


def test_an_intervention_that_changes_nothing_is_exactly_zero(run: tuple[Answers, Recorder]) -> None:
    for answers in run[0].all:
        for quantity in ("delta_h", "delta_h_kept", "delta_reward", "mean_delta_h"):
            estimate = answers[f"intervention/kl_cov/{quantity}"]
            assert (estimate.value, estimate.stderr) == (0.0, 0.0)
        assert answers["intervention/kl_cov/delta_h"].reason == RATIOS_ARE_ONE
        assert answers["intervention/kl_cov/price"].code == "too_small"


def test_a_kept_effect_includes_all_momentum_and_learning_rates_act_at_once(run: tuple[Answers, Recorder]) -> None:
    """At the third step with β1 = .9 the factor is 1 + .9 + .81."""
    for name, factor in (("psr", 2.71), ("max_grad_norm:0.05", 2.71), ("lr:0.5", 1.0)):
        once, kept = (run[0].all[-1][f"intervention/{name}/{quantity}"] for quantity in ("delta_h", "delta_h_kept"))
        assert kept.value == pytest.approx(factor * once.value)
        assert kept.stderr == pytest.approx(factor * once.stderr)


def test_the_mean_of_kept_effects_is_over_each_steps_own_momentum(run: tuple[Answers, Recorder]) -> None:
    """For effects e1, e2, e3 with decay .9 and β1 = .9 the mean is (.81 · 1 e1 + .9 · 1.9 e2 + 2.71 e3) / 2.71."""
    for name in ("psr", "bonus:0.5"):
        effects = [answers[f"intervention/{name}/delta_h"] for answers in run[0].all]
        mean = run[0].all[-1][f"intervention/{name}/mean_delta_h_kept"]
        weights = [0.81 * 1.0 / 2.71, 0.9 * 1.9 / 2.71, 2.71 / 2.71]
        assert mean.value == pytest.approx(sum(w * e.value for w, e in zip(weights, effects, strict=True)))
        errors = [(w * e.stderr) ** 2 for w, e in zip(weights, effects, strict=True)]
        assert mean.stderr == pytest.approx(math.sqrt(sum(errors)))
    nothing = run[0].all[-1]["intervention/kl_cov/mean_delta_h_kept"]
    assert (nothing.value, nothing.stderr) == (0.0, 0.0)


def test_a_kept_effect_of_sgd_is_divided_by_one_minus_its_momentum(make_trainer: Callable[..., Any]) -> None:
    """The factor is 1 / (1 − μ) from the first step on. Two different momenta have no common factor."""
    probe = Answers(["psr", "lr"])
    trainer = make_trainer(probes=[probe], optim="sgd", optim_args="momentum=0.75", learning_rate=0.1)
    trainer.train()
    for answers in probe.all:
        for name, factor in (("psr", 4.0), ("lr", 1.0)):
            once, kept = (answers[f"intervention/{name}/{quantity}"] for quantity in ("delta_h", "delta_h_kept"))
            assert kept.value == pytest.approx(factor * once.value)
    states = {
        name: SGDState(None, lr=0.1, momentum=momentum, dampening=0.0, weight_decay=0.0, nesterov=False)
        for name, momentum in (("a", 0.75), ("b", 0.5))
    }
    assert math.isnan(OptimizerView(states, math.inf).steady_state_factor)


def test_weights_decay_at_steps_between_measurements_too(make_trainer: Callable[..., Any]) -> None:
    """Steps 1 and 4 are measured. With decay .9 the first has weight .9³."""
    probe = Answers(["lr"], every=3)
    make_trainer(probes=[probe], max_steps=4, gradient_accumulation_steps=8, per_device_train_batch_size=4).train()
    first, last = (answers["intervention/lr/delta_h"].value for answers in probe.all)
    mean = probe.all[-1]["intervention/lr/mean_delta_h"]
    assert mean.value == pytest.approx((0.729 * first + last) / 1.729)
    assert mean.detail == {"measured_steps": 2, "strength": 0.5}


def test_the_strength_that_halves_the_entropy_fall_is_extrapolated_linearly() -> None:
    """Entropy falls by 4 per step. A bonus of .5 adds 4 when kept, so half of it suffices. lr × .5 adds 2 at once."""

    def pair(delta_h: float, error: float) -> Pair:
        return Pair(torch.tensor([delta_h, 0.0]).double(), torch.eye(2).double() * error**2, 20)

    plain = pair(-4.0, 0.1)
    assert kept_halving(parse_intervention("bonus:0.5"), pair(4.0, 0.1), plain).value == pytest.approx(0.25)
    assert kept_halving(parse_intervention("lr:0.5"), pair(2.0, 0.1), plain).value == pytest.approx(0.5)
    assert kept_halving(parse_intervention("lr:2"), pair(-4.0, 0.1), plain).value == pytest.approx(0.5)
    unknown = {
        "never_half": kept_halving(parse_intervention("w_reinforce:0.5"), pair(0.5, 0.1), plain),
        "no_strength": kept_halving(parse_intervention("psr"), pair(2.0, 0.1), plain),
        "not_linear": kept_halving(parse_intervention("clip_cov"), pair(2.0, 0.1), plain),
        "no_fall": kept_halving(parse_intervention("bonus"), pair(2.0, 0.1), pair(-0.1, 0.1)),
    }
    assert {code: estimate.code for code, estimate in unknown.items()} == {code: code for code in unknown}
    for change in (pair(0.1, 0.1), pair(math.nan, 0.1)):
        assert kept_halving(parse_intervention("bonus"), change, plain).code == "interval_holds_0"


def test_means_are_weighted_over_the_measured_steps(run: tuple[Answers, Recorder]) -> None:
    weights = [0.81, 0.9, 1.0]
    for quantity in ("delta_h", "delta_reward"):
        steps = [answers[f"intervention/psr/{quantity}"] for answers in run[0].all]
        mean = run[0].all[-1][f"intervention/psr/mean_{quantity}"]
        assert mean.value == pytest.approx(sum(w * e.value for w, e in zip(weights, steps, strict=True)) / 2.71)
        square = sum((w * e.stderr) ** 2 for w, e in zip(weights, steps, strict=True))
        assert mean.stderr == pytest.approx(math.sqrt(square) / 2.71)
    assert run[0].all[-1]["intervention/psr/mean_delta_h"].detail == {"measured_steps": 3}


def test_the_price_is_a_ratio_with_its_fieller_interval() -> None:
    """Its interval is found by trial: all ratios ρ for which ΔJ + ρ ΔH is within its error of 0."""
    pair = Pair(torch.tensor([-2.0, 0.6]).double(), torch.tensor([[0.09, -0.02], [-0.02, 0.04]]).double(), 7)
    price = pair.minus_ratio("lost")
    assert price.value == pytest.approx(0.3)

    def is_allowed(ratio: float) -> bool:
        error = math.sqrt(0.04 - 2 * ratio * 0.02 + ratio**2 * 0.09)
        return abs(0.6 - 2.0 * ratio) <= 2.3646243 * error  # 95 % quantile of Student's t with 7 degrees of freedom

    allowed = [k / 10000 for k in range(-20000, 20000) if is_allowed(k / 10000)]
    assert price.interval == pytest.approx((allowed[0], allowed[-1]), abs=2e-4)
    assert price.stderr == pytest.approx(math.sqrt(0.04 - 0.6 * 0.02 + 0.09 * 0.09) / 2)
    lost = Pair(torch.tensor([-0.6, 0.6]).double(), pair.covariance, 7).minus_ratio("the interval includes 0")
    assert math.isnan(lost.value)
    assert lost.reason == "the interval includes 0"


def test_prices_are_ratios_of_a_steps_changes_or_of_their_means(run: tuple[Answers, Recorder]) -> None:
    """For a step, and for the means, which differ from the third step. If entropy falls (lr:2), it has a price too."""
    known = {"": 0, "mean_": 0}
    for answers in run[0].all:
        for name in WHICH:
            for mean in known:
                price = answers[f"intervention/{name}/{mean}price"]
                change, reward = (answers[f"intervention/{name}/{mean}{q}"] for q in ("delta_h", "delta_reward"))
                low, high = change.bounds()
                is_small = not mean and abs(change.value) < 1e-4
                assert math.isnan(price.value) == (low <= 0 <= high or is_small)
                if not math.isnan(price.value):
                    assert price.value == pytest.approx(-reward.value / change.value)
                    known[mean] += 1
    assert min(known.values()) >= 2
    falling = [a["intervention/lr:2/price"] for a in run[0].all if a["intervention/lr:2/delta_h"].bounds()[1] < -1e-4]
    assert falling
    assert all(math.isfinite(price.value) for price in falling)


def test_interventions_continue_from_their_state_as_if_never_stopped(make_trainer: Callable[..., Any]) -> None:
    stopped, resumed = Answers(["psr", "lr"]), Answers(["lr", "nsr"])
    make_trainer(probes=[stopped], max_steps=1).train()
    state = from_tensors(resumed.init(), to_tensors(stopped.state))
    assert state.keys() == resumed.init().keys()
    assert repr(state["lr"]) == repr(stopped.state["lr"])
    assert (state["lr"].num_steps, state["nsr"].num_steps) == (1, 0)


def codes(answers: dict[str, Estimate], quantity: str) -> dict[str, str]:
    """Return by intervention the code of the reason why a quantity is missing, for those where it is missing."""
    there = {name.split("/")[1]: e for name, e in answers.items() if name.endswith(f"/{quantity}")}
    return {name: estimate.code for name, estimate in there.items() if math.isnan(estimate.value)}


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"steps_per_generation": 8, "gradient_accumulation_steps": 4}, "off_policy_effects"),
        ({"num_iterations": 2}, "reused"),
    ],
)
def test_an_effect_that_cannot_be_predicted_has_a_reason(make_trainer, settings: dict[str, Any], code: str) -> None:
    probe = Answers(["bonus", "lr"])
    make_trainer(probes=[probe], **settings).train()
    assert {*codes(probe.all[-1], "delta_h").values()} == {code}
    assert len(probe.all[-1]) == 2 * 9 + 4
    assert all(math.isnan(estimate.value) for estimate in probe.all[-1].values())


def test_too_few_folds_give_a_reason_and_no_effect(make_trainer: Callable[..., Any]) -> None:
    """Four microbatches of two prompts give four folds."""
    few, enough = Answers(["lr"], num_folds=2), Answers(["lr"], num_folds=None)
    for probe in (few, enough):
        make_trainer(probes=[probe], max_steps=1).train()
    assert few.all[0]["intervention/lr/delta_h"].code == "few_folds"
    assert math.isfinite(enough.all[0]["intervention/lr/delta_h"].value)


def test_with_another_loss_interventions_on_dr_grpos_weights_are_missing(make_trainer: Callable[..., Any]) -> None:
    probe = Answers(["bonus", "psr", "lr", "std_norm"])
    plain = {"loss_type": "dr_grpo", "scale_rewards": "group", "beta": 0.0, "bf16": False, "use_cpu": True}
    trainer = make_trainer(GRPOTrainer, config_class=GRPOConfig, **plain)
    with attach(trainer, probes=[probe], whole_prompts=True):
        trainer.train()
    for quantity in ("delta_h", "delta_reward"):
        assert codes(probe.all[-1], quantity) == {"std_norm": "intervention_needs_dr_grpo"}


def test_the_model_without_its_adapters_is_the_reference_of_kl(make_trainer: Callable[..., Any]) -> None:
    """The first step starts at the reference, so the KL has no gradient. Without adapters there is no reference."""
    probe, full = Answers(["kl:5"]), Answers(["kl:5"])
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    make_trainer(probes=[probe], peft_config=adapters, reward=graded, learning_rate=3e-3).train()
    first, second = (answers["intervention/kl:5/delta_h"] for answers in probe.all)
    assert abs(first.value) < 1e-6
    assert abs(second.value) > 1e-5
    assert GROWS in second.reason
    make_trainer(probes=[full], max_steps=1).train()
    assert codes(full.all[0], "delta_h") == {"kl:5": "intervention_needs_reference"}


def test_only_loss_weights_that_are_not_multiples_need_their_own_backward() -> None:
    """Weights that differ from a multiple by half a percent need their own backward."""
    plain = torch.tensor([[[1.0, -2.0], [0.5, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])  # for log-probabilities, entropies
    none = torch.zeros(2, 2)
    further = {
        "twice": plain,
        "first": torch.stack([torch.tensor([[0.0, 0.0], [-0.5, 0.0]]), none]),
        "second": torch.stack([torch.tensor([[-1.0, 2.0], [0.0, 0.0]]), none]),
        "bonus": torch.stack([none, torch.full((2, 2), 0.3)]),
        "nearly twice": torch.stack([torch.tensor([[1.01, -2.0], [0.5, 0.0]]), none]),
    }
    without_basis, by_basis = changes_by_basis(further, plain, ALONE)
    assert without_basis["twice"].gradient == pytest.approx(1.0)
    assert {name: list(changes) for name, changes in by_basis.items()} == {
        "first": ["first", "second"],
        "bonus": ["bonus"],
        "nearly twice": ["nearly twice"],
    }
    second = by_basis["first"]["second"]  # equals −plain − first
    assert (second.gradient, second.basis) == pytest.approx((-1.0, -1.0))

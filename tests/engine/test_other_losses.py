"""Losses with terms that Dr-GRPO's lacks: an entropy bonus is measured, and what cannot be measured is reported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from seen import Seen
from simple_twin import Recorder
from since import since
from trainers import FEW
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rl_training import Reading, attach
from rl_training.hosts.trl.settings.loss import DR_GRPO, loss_settings
from rl_training.hosts.trl.versions import OF_ARGUMENTS
from rl_training.models.load import load_tiny
from rl_training.policy.scores import Scores
from rl_training.probes import GradientNoiseScaleProbe, SimpleEntropyProbe
from rl_training.step.loss_weights import LossWeights, gradient_of
from rl_training.step.needs import Need

PLAIN = {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0, "bf16": False, "use_cpu": True}
OTHER = {
    "loss_type": "grpo",
    "scale_rewards": "group",
    "multi_objective_aggregation": "normalize_then_sum",
    "beta": 0.1,
    "importance_sampling_level": "sequence",
    "entropy_coef": 0.1,
    "use_adaptive_entropy": True,
    "top_entropy_quantile": 0.5,
    "delta": 2.0,
    "off_policy_mask_threshold": 0.5,
}


class FoldsAndTwins(Seen):
    """Keeps each fold's gradient, and a twin computed by a forward pass over the fold's rows alone."""

    needs = Need.FOLD_GRADIENTS

    def __init__(self, num_folds: int) -> None:
        super().__init__()
        self.num_folds = num_folds

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        reading = super().measure(ctx, state)
        loss, parameters = step.batch.loss_weights, list(ctx.policy.model.parameters())
        self.kept, self.twins = torch.cat(step.gradients.by_fold.means(), dim=1), []
        for fold in range(self.num_folds):
            rows = (step.batch.fold == fold).nonzero().squeeze(1)
            fresh = ctx.policy.score(step.batch.rollout, rows)
            total = (loss.logps[rows, : fresh.logps.shape[1]] * fresh.logps).sum()
            total = total + (loss.entropies[rows, : fresh.logps.shape[1]] * fresh.entropies).sum()
            gradient = torch.autograd.grad(total * len(step.batch.fold) / len(rows), parameters)
            self.twins.append(torch.cat([g.flatten() for g in gradient]))
        return reading


@since("trl 1.8.0")
def test_gradients_of_recomputed_folds_include_the_entropy_bonus(make_trainer) -> None:
    probe = FoldsAndTwins(num_folds=8)  # there are 4 microbatches with 2 prompts each
    trainer = make_trainer(
        GRPOTrainer,
        config_class=GRPOConfig,
        reward=lambda completions, **kwargs: [1.0] * len(completions),  # so that only the bonus is left of the loss
        max_steps=1,
        **PLAIN | {"entropy_coef": 0.1},
    )
    with attach(trainer, probes=[probe], whole_prompts=True):
        trainer.train()
    for kept, twin in zip(probe.kept, probe.twins, strict=True):
        assert float(twin.norm()) > 1e-3
        assert float((kept - twin).norm() / twin.norm()) < 1e-5


def test_loss_weights_of_some_rows_include_their_entropy_bonus() -> None:
    """Each token has ∂log π = 2, ∂h = 5. Two of three one-token sequences: ½ (1 · 2 + 10 · 5) + ¼ (2 · 2 + 20 · 5)."""
    theta = torch.ones((), requires_grad=True)
    ones = torch.ones(2, 1)
    fresh = Scores(2 * theta * ones, 5 * theta * ones, ones)
    loss = LossWeights(torch.tensor([[1.0], [7.0], [2.0]]), torch.tensor([[10.0], [70.0], [20.0]]))
    weights_of_rows = loss.of_rows(torch.tensor([0, 2]), 1, torch.tensor([[0.5], [0.25]]))
    (gradient,) = gradient_of(fresh, weights_of_rows.logps, weights_of_rows.entropies, [theta])
    assert float(gradient) == pytest.approx(0.5 * 52 + 0.25 * 104)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, marks=[since(OF_ARGUMENTS[name].since)] if name in OF_ARGUMENTS else [])
        for name, value in OTHER.items()
    ],
)
def test_every_loss_setting_of_trl_is_distinguished_from_dr_grpo(make_trainer: Any, name: str, value: Any) -> None:
    needed = {"steps_per_generation": 8} if name == "off_policy_mask_threshold" else {}
    trainer = make_trainer(**{name: value}, **needed)
    assert getattr(trainer.args, name) == value
    assert loss_settings(trainer).differs == {name}


def test_the_checked_settings_are_all_that_define_dr_grpo(make_trainer: Any) -> None:
    assert set(OTHER) == set(DR_GRPO)
    assert loss_settings(make_trainer()).differs == frozenset()


@since("trl 1.8.0")
def test_the_split_of_the_trace_is_missing_where_the_loss_is_no_longer_dr_grpo(make_trainer) -> None:
    probe = GradientNoiseScaleProbe(split_prompts=1)
    trainer = make_trainer(GRPOTrainer, config_class=GRPOConfig, max_steps=1, **PLAIN | {"entropy_coef": 0.1})
    assert loss_settings(trainer).differs == {"entropy_coef"}
    with attach(trainer, probes=[probe], whole_prompts=True) as attached:
        trainer.train()
    answer = attached.latest["gns/trace_between"]
    assert math.isnan(answer.value)
    assert answer.code == "other_loss"


@pytest.mark.parametrize("threshold", [0.0, -1.0])
def test_a_clipping_threshold_of_zero_or_less_does_not_clip(make_trainer, threshold: float) -> None:
    forwards = []
    for max_grad_norm in (threshold, 1e9):
        trainer = make_trainer(probes=[SimpleEntropyProbe()], max_grad_norm=max_grad_norm, max_steps=1)
        trainer.train()
        forwards.append(trainer.attachment.latest["delta_h/forward"].value)
    assert forwards[0] == forwards[1]


class Clips(TrainerCallback):
    """Sets another clipping threshold before the second step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        args.max_grad_norm = 0.02 if state.global_step else args.max_grad_norm


def test_a_clipping_threshold_that_a_callback_changes_is_that_of_the_steps_formula(make_trainer) -> None:
    trainer = make_trainer(probes=[SimpleEntropyProbe()], **FEW | {"max_steps": 2, "max_grad_norm": 1e9})
    trainer.add_callback(Clips())
    trainer.train()
    latest = trainer.attachment.latest
    assert trainer.state.log_history[-2]["grad_norm"] > 0.1  # so that the second step is clipped
    assert latest["step/formula_error"].value < 1e-3
    assert math.isfinite(latest["delta_h/forward"].value)


@since("trl 1.7.0")
def test_folds_of_a_loss_with_an_auxiliary_term_are_its_microbatches_whatever_number_is_requested(
    make_trainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Further passes over some prompts would lack the term. The announcement promises no other folds."""
    _, tokenizer = load_tiny()
    torch.manual_seed(0)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32) | dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size"), 16
    )
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    router = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
    experts = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **heads, **router))
    settings = {"max_steps": 2, "learning_rate": 1e-3, "max_completion_length": 8, "gradient_accumulation_steps": 2}
    for num_folds in (None, 4):
        recorder = Recorder()
        trainer = make_trainer(probes=[SimpleEntropyProbe(num_folds=num_folds), recorder], model=experts, **settings)
        caplog.clear()
        trainer.train()
        assert math.isfinite(trainer.attachment.latest["delta_h/forward"].value)
        assert len(recorder.steps[-1].fold.unique()) == 2
        announced = "\n".join(caplog.messages)
        assert "measure 2 folds of whole prompts a step, from 2 microbatches" in announced
        assert "once more" not in announced  # nor is it advised to request more folds

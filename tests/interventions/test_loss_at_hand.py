"""Interventions on a loss that its settings do not describe: those that contradict its weights are unavailable."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from own_losses import PLAIN, Longer
from seen import Seen
from torch import Tensor
from trainers import graded
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from rl_training import DrGRPOTrainer, attach
from rl_training.errors import UserError
from rl_training.interventions.loss import LossInputs, loss_inputs
from rl_training.interventions.named import INTERVENTIONS, NEEDS
from rl_training.policy.scores import Scores
from rl_training.probes import InterventionsProbe
from rl_training.step.loss_weights import LossWeights

STEP: dict[str, Any] = PLAIN | {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "max_completion_length": 16, "reward": graded,
    "max_steps": 1,
}  # fmt: skip
WHICH = ["psr", "bonus", "lr", "length_norm", "std_norm", "kl_cov"]


class Pulled(GRPOTrainer):
    """Pulls every log-probability towards 0, regardless of the advantage."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        kept = []
        forward = self._get_per_token_logps_and_entropies

        def keep(*args: Any, **kwargs: Any) -> Any:
            kept.append(forward(*args, **kwargs))
            return kept[-1]

        self._get_per_token_logps_and_entropies = keep
        try:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._get_per_token_logps_and_entropies = forward
        return loss - 1e-4 * (kept[0][0] * inputs["completion_mask"]).sum()


@pytest.mark.parametrize(
    ("kind", "settings", "missing"),
    [
        (GRPOTrainer, {}, {}),
        (
            GMPOTrainer,
            {"config_class": GMPOConfig},
            {"length_norm": "dr_grpo", "std_norm": "dr_grpo", "kl_cov": "unit"},
        ),
        (Pulled, {}, {"psr": "advantages", "length_norm": "dr_grpo", "std_norm": "dr_grpo", "kl_cov": "unit"}),
    ],
)
def test_an_intervention_is_missing_where_the_loss_has_not_the_weights_it_changes(
    make_trainer: Any, kind: Any, settings: dict[str, Any], missing: dict[str, str]
) -> None:
    probe, trainer = InterventionsProbe(WHICH, every=1), make_trainer(kind, **STEP | settings)
    with attach(trainer, probes=[probe], whole_prompts=True) as attached:
        trainer.train()
    for name in WHICH:
        estimate = attached.latest[f"intervention/{name}/delta_h"]
        assert math.isnan(estimate.value) == (name in missing), name
        if name in missing:
            assert estimate.reason == NEEDS[missing[name]]


def test_training_with_an_intervention_is_refused_for_a_subclass_with_its_own_loss(make_trainer: Any) -> None:
    class PerLength(DrGRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            return 5.0 * super().compute_loss(model, inputs, *args, **kwargs)

    settings = {"reward": graded, "max_steps": 1, "per_device_train_batch_size": 4}
    make_trainer(PerLength, interventions=["psr"], **settings).train()  # psr works with any scale
    with pytest.raises(UserError, match=r"^interventions=\['length_norm'\]: .*loss_type='dr_grpo'"):
        make_trainer(PerLength, interventions=["length_norm"], **settings).train()


def test_the_loss_weight_unit_uses_the_longest_response_of_the_step(make_trainer: Any) -> None:
    seen = Seen()
    trainer = make_trainer(GRPOTrainer, **STEP | {"max_steps": 3})
    trainer.add_callback(Longer(trainer))
    with attach(trainer, probes=[seen], whole_prompts=True):
        trainer.train()
    for step in seen.kept_steps:
        for part in loss_inputs(step.batch, torch.clone):
            tokens = (part.scores.mask != 0) & (part.advantages.unsqueeze(1) != 0)
            units = (-part.weights.logps / part.advantages.unsqueeze(1))[tokens]
            assert part.is_dr_grpo
            torch.testing.assert_close(units, torch.full_like(units, part.unit))


def inputs_of(weights: list[list[float]], advantages: list[float]) -> LossInputs:
    table = torch.tensor(weights)
    scores = Scores(torch.zeros_like(table), torch.zeros_like(table), torch.ones_like(table))
    prompts = torch.arange(len(advantages))
    return LossInputs(LossWeights(table, None), scores, torch.tensor(advantages), prompts).with_loss_facts()


def test_weights_proportional_to_advantages_have_their_signs_and_their_zeros() -> None:
    assert inputs_of([[-1.0, -3.0], [2.0, 0.0], [0.0, 0.0]], [0.5, -0.5, 0.0]).is_of_advantages
    assert not inputs_of([[-1.0, 3.0], [2.0, 0.0]], [0.5, -0.5]).is_of_advantages
    assert not inputs_of([[-1.0, -3.0], [2.0, 0.1]], [0.5, 0.0]).is_of_advantages
    assert inputs_of([[0.0, 0.0]], [0.0]).is_of_advantages
    assert not inputs_of([[0.0, 0.0]], [0.0]).is_dr_grpo  # its settings are unknown


def test_std_norm_uses_the_known_rewards_of_a_group() -> None:
    """1 and 3 have standard deviation √2. A single reward has none, as in TRL."""
    weights = LossWeights(torch.ones(5, 1), None)
    loss = LossInputs(
        weights, Scores(torch.zeros(5, 1), torch.zeros(5, 1), torch.ones(5, 1)), torch.ones(5),
        torch.tensor([0, 0, 0, 1, 1]), rewards=torch.tensor([1.0, math.nan, 3.0, 2.0, math.nan]),
    )  # fmt: skip
    logps = INTERVENTIONS["std_norm"].weights(loss).logps.flatten().tolist()
    assert logps == pytest.approx([1 / (math.sqrt(2) + 1e-4)] * 3 + [1e4] * 2)

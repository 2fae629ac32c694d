"""The interventions probe: against a slow twin that makes every step with torch's own AdamW, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from simple_twin import L_MAX, Recorder, Twin
from torch import Tensor
from trainers import graded, trainer_maker

from rl_training import Estimate
from rl_training.probes import InterventionsProbe, SimpleEntropyProbe

NUM_FOLDS, G, MICROBATCHES = 8, 4, 4
WHICH = ["bonus:0.5", "psr", "nsr", "w_reinforce:0.5", "lr:0.5", "max_grad_norm:0.05", "clip_cov:0.1", "kl_cov"]


class Answers(InterventionsProbe):
    """The probe, with its answers kept."""

    def __init__(self, which: Any = WHICH, num_folds: int | None = NUM_FOLDS, every: int = 1, **options: Any) -> None:
        super().__init__(which, every=every, num_folds=num_folds, **options)
        self.all: list[dict[str, Estimate]] = []

    def results(self) -> dict[str, Estimate]:
        self.all.append(super().results())
        return self.all[-1]


class InterventionsTwin(Twin):
    """What the interventions would do at a step: each δθ_(−k) made again by torch's AdamW, all in float64."""

    def gradients_with(self, name: str) -> Tensor:
        """The gradient of each fold, (K, P)."""
        advantages = self.step.rollout.advantages.tolist()
        if name.startswith("bonus"):
            size = len(self.lengths) // MICROBATCHES
            tokens = [sum(self.lengths[size * (i // size) :][:size]) for i in range(len(self.lengths))]
            of = [self.gradient(self.entropies[i].sum()) / tokens[i] * size for i in range(len(tokens))]
            return self.gradients - 0.5 * torch.stack(
                [torch.stack([of[i] for i in fold]).mean(0) for fold in self.folds]
            )
        if name.startswith("clip_cov"):
            return torch.stack([self.clipped_covariance(fold) for fold in self.folds])
        factor = {"psr": (1, 0), "nsr": (0, 1), "w_reinforce:0.5": (0.5, 1)}.get(name, (1, 1))
        factors = torch.tensor([factor[a < 0] for a in advantages]).double().unsqueeze(1)
        return torch.stack([(factors * self.d_loss)[fold].mean(dim=0) for fold in self.folds])

    def clipped_covariance(self, fold: list[int]) -> Tensor:
        """The gradient of a fold without the tenth of its microbatch's tokens that covary most."""
        size = len(self.lengths) // MICROBATCHES
        first = size * (fold[0] // size)
        advantages = self.step.rollout.advantages.tolist()
        tokens = [(i, t) for i in range(first, first + size) for t in range(self.lengths[i])]
        mean_a = sum(advantages[i] for i, _ in tokens) / len(tokens)
        mean_l = sum(float(self.logps[i][t]) for i, t in tokens) / len(tokens)
        tokens.sort(key=lambda at: -(advantages[at[0]] - mean_a) * (float(self.logps[at[0]][at[1]]) - mean_l))
        kept = tokens[int(0.1 * len(tokens)) :]
        terms = [-advantages[i] * self.logps[i][t] for i, t in kept if i in fold]
        return self.gradient(sum(terms) / L_MAX) / len(fold)

    def steps_with(self, name: str, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """The whole step, (P,), and those without each fold, (K, P)."""
        threshold = 0.05 if name.startswith("max_grad_norm") else None
        factor = 0.5 if name == "lr:0.5" else 1.0
        mean, without = self.mean(gradients), self.means_without(gradients)
        return tuple(factor * self.adamw(g, max_grad_norm=threshold)[0] for g in (mean, without))

    def answers(self, name: str) -> dict[str, float]:
        """ΔH, Δreward and their errors, by delete-one-fold over all pairs of folds."""
        whole, without = self.steps_with(name, self.gradients_with(name))
        whole, without = whole - self.update, without - self.update_without
        x = self.x[0] - self.level * self.x[1]
        j = -self.gradients * L_MAX * G / (G - 1)
        sizes = torch.tensor([len(fold) for fold in self.folds]).double()
        tokens = torch.tensor([sum(self.lengths[i] for i in fold) for fold in self.folds]).double()
        found = {}
        for quantity, direction, units in (("delta_h", x, tokens), ("delta_reward", j, sizes)):
            products = direction @ without.T  # [k, l]: X_k · Δ_(−l)
            own = products.diagonal()
            found[quantity] = float(sizes @ own / units.sum())
            values = []
            for out in range(len(sizes)):
                kept = [k for k in range(len(sizes)) if k != out]
                moved = own + products[:, out] - direction @ whole
                values.append(float(sizes[kept] @ moved[kept] / units[kept].sum()))
            mean = sum(values) / len(values)
            variance = (len(values) - 1) / len(values) * sum((v - mean) ** 2 for v in values)
            found[f"{quantity}_se"] = math.sqrt(variance)
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, Recorder]:
    probe, recorder = Answers(), Recorder()
    make = trainer_maker(tmp_path_factory.mktemp("interventions"))
    make(probes=[probe, SimpleEntropyProbe(num_folds=NUM_FOLDS), recorder], reward=graded).train()
    return probe, recorder


@pytest.fixture(scope="module")
def twin(run: tuple[Answers, Recorder]) -> InterventionsTwin:
    return InterventionsTwin(run[1].steps[-1], responses=1, estimator="rb")


@pytest.mark.parametrize("name", [name for name in WHICH if name != "kl_cov"])
def test_it_is_the_difference_of_the_steps_of_the_twin(
    run: tuple[Answers, Recorder], twin: InterventionsTwin, name: str
) -> None:
    answers, expected = run[0].all[-1], twin.answers(name)
    for quantity in ("delta_h", "delta_reward"):
        found = answers[f"intervention/{name}/{quantity}"]
        assert found.value == pytest.approx(expected[quantity], rel=1e-3), quantity
        assert found.stderr == pytest.approx(expected[f"{quantity}_se"], rel=1e-3), quantity

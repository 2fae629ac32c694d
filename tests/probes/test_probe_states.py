"""Probes' states belong to one training: the next starts from scratch, even with the same probe objects."""

from __future__ import annotations

from typing import Any

import plain_loop
import torch
from seen import Kept
from shared_rollouts import MICROBATCH, G
from trainers import every_probe, graded
from transformers import set_seed

from rl_training import Estimate, Probe, measured_loop
from rl_training.models.load import load_tiny
from rl_training.probes import InterventionsProbe, TokenClassesProbe

QUICK: dict[str, Any] = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_completion_length": 8, "reward": graded,
}  # fmt: skip
MICROBATCHES = 4  # per step of a loop


class KeptTokenClasses(Kept, TokenClassesProbe):
    pass


def all_probes() -> list[Probe]:
    return [*every_probe(), InterventionsProbe(["lr:0.5", "nsr"], every=1), KeptTokenClasses(every=1)]


def without_seconds(estimates: dict[str, Estimate]) -> str:
    return repr({name: estimate for name, estimate in estimates.items() if not name.endswith("seconds")})


def test_a_second_training_with_the_same_probes_equals_one_with_fresh_probes(make_trainer) -> None:
    """Also if it is attached before the first one has started."""
    probes = all_probes()
    trainers = [make_trainer(probes=probes, seed=number, max_steps=number, **QUICK) for number in (1, 2)]
    fresh = make_trainer(probes=all_probes(), seed=2, **QUICK)
    for trainer in (*trainers, fresh):
        set_seed(trainer.args.seed)
        trainer.train()
    estimates = [trainer.attachment.latest for trainer in (trainers[1], fresh)]
    assert without_seconds(dict(estimates[0])) == without_seconds(dict(estimates[1]))
    assert estimates[0]["delta_h/cumulative_predicted"].value != 0


def test_a_second_loop_with_the_same_probes_equals_one_with_fresh_probes() -> None:
    def trained(probes: list[Probe]) -> list[dict[str, Estimate]]:
        torch.manual_seed(0)
        model = load_tiny()[0]
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        loop = measured_loop(
            model, optimizer, probes, responses_per_prompt=G, microbatch_size=MICROBATCH,
            microbatches=MICROBATCHES, max_grad_norm=plain_loop.CLIP, dr_grpo=True,
        )  # fmt: skip
        return plain_loop.train(model, optimizer, loop, steps=2, count=MICROBATCHES)

    probes = all_probes()
    first, again = trained(probes), trained(probes)
    assert [*map(without_seconds, again)] == [*map(without_seconds, first)]

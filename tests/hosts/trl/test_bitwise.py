"""Trainings of every kind are bitwise the same with all probes and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.nn.utils.parametrizations import spectral_norm
from trainers import LORA, differing, every_probe, graded, outcome, outcome_without_probes

from rl_training import DrGRPOTrainer
from rl_training.probes import InterventionsProbe, TokenClassesProbe


class Normed(DrGRPOTrainer):
    """Each forward pass of its model improves the vectors by which a weight is normed."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            spectral_norm(model.model.layers[0].self_attn.q_proj)
        super().__init__(model, *args, **kwargs)


SHORT: dict[str, Any] = {"per_device_train_batch_size": 4, "max_completion_length": 8, "reward": graded}
# One training combines several settings if none of them stops a probe from measuring.
KINDS: dict[str, dict[str, Any]] = {
    "folds of single prompts, of which microbatches have two, and truth that is sampled afresh": {
        "per_device_train_batch_size": 8, "learning_rate": 1e-2,
    },
    "responses that are learned from again, with buffers that forward passes change": {
        "trainer_class": Normed, "num_iterations": 2, "max_steps": 3,  # the third step has a new rollout
    },
    "a rollout of two steps, with interventions": {"steps_per_generation": 8, "interventions": ("psr", "bonus")},
    "dropout of an adapter, in bf16 and with checkpointing": {
        "lora": True, "bf16": True, "activation_checkpointing": True,
    },
    "top-p": {"top_p": 0.8},
    "every response is truncated and hidden": {"mask_truncated_completions": True, "max_completion_length": 3},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_training_with_every_probe_is_bitwise_training_without_probes(
    make_trainer: Callable[..., Any], kind: str
) -> None:
    settings = SHORT | KINDS[kind]
    bare = outcome_without_probes(**settings)
    peft_config = LoraConfig(**LORA) if settings.pop("lora", False) else None
    num_folds = settings["per_device_train_batch_size"]  # there are four microbatches of one or two prompts
    more = [InterventionsProbe(["psr", "bonus"], every=1), TokenClassesProbe(every=1)]
    probes = [*every_probe(num_folds=num_folds, offload=True), *more]
    trainer = make_trainer(probes=probes, peft_config=peft_config, **settings)
    assert differing(outcome(trainer), bare) == []
    assert len(trainer.attachment.latest) > 100

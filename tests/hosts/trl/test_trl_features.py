"""The trainings that TRL's documentation shows take probes with one line more, and are bitwise what they were."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trainers import TWO_STEPS
from trl import GRPOConfig, GRPOTrainer

from rl_training import attach
from rl_training.probes import EffectiveSampleSizeProbe, GradientNoiseScaleProbe, SimpleEntropyProbe
from rl_training.tasks.models import load_tiny

SUMS = [f"{i}+{i % 7}=" for i in range(16)]
STANDARD = Dataset.from_dict({"prompt": SUMS})
CONVERSATIONAL = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in SUMS]})


def unlike(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(set(str(completion)))) for completion in completions]


def short(completions: list[Any], **kwargs: Any) -> list[float]:
    return [-float(len(str(completion))) for completion in completions]


EXAMPLES: dict[str, dict[str, Any]] = {
    "a reward function": {"reward_funcs": unlike, "train_dataset": STANDARD},
    "several weighted ones": {"reward_funcs": [unlike, short], "train_dataset": STANDARD, "reward_weights": [1.0, 0.1]},
    "conversational": {"reward_funcs": unlike, "train_dataset": CONVERSATIONAL},
    "PEFT": {
        "reward_funcs": unlike,
        "train_dataset": STANDARD,
        "peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM"),
    },
    "beams": {"reward_funcs": unlike, "train_dataset": STANDARD, "generation_kwargs": {"num_beams": 2}},
}


def trained(folder: Any, example: dict[str, Any], probes: list[Any]) -> tuple[dict[str, torch.Tensor], list[dict]]:
    model, tokenizer = load_tiny()
    tokenizer.chat_template = "{%- for message in messages -%}{{ message.content }}{%- endfor -%}"
    arguments = dict(example)
    settings = {name: arguments.pop(name) for name in ("reward_weights", "generation_kwargs") if name in arguments}
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(
            str(folder),
            **TWO_STEPS,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_completion_length=16,
            **settings,
        ),
        processing_class=tokenizer,
        **arguments,
    )
    if probes:
        attach(trainer, probes)
    trainer.train()
    return {name: p.detach() for name, p in trainer.model.named_parameters()}, trainer.state.log_history


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_trls_with_attach_in_one_line_more(tmp_path, name: str) -> None:
    bare, _ = trained(tmp_path, EXAMPLES[name], [])
    probes = [SimpleEntropyProbe(), GradientNoiseScaleProbe(), EffectiveSampleSizeProbe()]
    probed, logs = trained(tmp_path, EXAMPLES[name], probes)
    assert [key for key in bare if not torch.equal(bare[key], probed[key])] == []
    logged = {key for line in logs for key, value in line.items() if math.isfinite(value)}
    of_policy = "entropy/visited_prefixes" if name == "beams" else "entropy/token"
    assert {of_policy, "ess/zero_advantage", "ess/zero_advantage_prompts"} <= logged
    assert ("delta_h/backward" in logged) == (name != "beams")

"""The trainings in TRL's documentation take probes with one more line, and stay bitwise the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from trainers import FEW, LORA, Outcome, differing, outcome
from trl import GRPOConfig, GRPOTrainer

from rl_training import attach
from rl_training.models.load import load_tiny
from rl_training.probes import EffectiveSampleSizeProbe, GradientNoiseScaleProbe, SimpleEntropyProbe

SUMS = [f"{i}+{i % 7}=" for i in range(16)]
STANDARD = Dataset.from_dict({"prompt": SUMS})
CONVERSATIONAL = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in SUMS]})


def unlike(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(set(str(completion)))) for completion in completions]


def short(completions: list[Any], **kwargs: Any) -> list[float]:
    return [-float(len(str(completion))) for completion in completions]


EXAMPLES: dict[str, dict[str, Any]] = {
    "a reward function": {"train_dataset": STANDARD},
    "several weighted ones": {"reward": [unlike, short], "train_dataset": STANDARD, "reward_weights": [1.0, 0.1]},
    "conversational": {"train_dataset": CONVERSATIONAL},
    "PEFT": {"train_dataset": STANDARD, "peft_config": LoraConfig(**LORA)},
    "beams": {"train_dataset": STANDARD, "generation_kwargs": {"num_beams": 2}},
}


def trained(make_trainer: Any, example: dict[str, Any], probes: list[Any]) -> tuple[Outcome, list[dict[str, Any]]]:
    tokenizer = load_tiny()[1]
    tokenizer.chat_template = "{%- for message in messages -%}{{ message.content }}{%- endfor -%}"
    settings = FEW | {"per_device_train_batch_size": 8, "max_completion_length": 16, "reward": unlike} | example
    trainer = make_trainer(
        GRPOTrainer, config_class=GRPOConfig, processing_class=tokenizer, bf16=False, use_cpu=True, **settings
    )
    if probes:
        attach(trainer, probes=probes, metrics="all", whole_prompts=False)
    return outcome(trainer), trainer.state.log_history


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_trl_example_runs_with_one_more_line_for_attach(make_trainer, name: str) -> None:
    bare, _ = trained(make_trainer, EXAMPLES[name], [])
    probes = [SimpleEntropyProbe(), GradientNoiseScaleProbe(), EffectiveSampleSizeProbe()]
    probed, logs = trained(make_trainer, EXAMPLES[name], probes)
    assert differing(bare, probed) == []
    logged = {key for line in logs for key, value in line.items() if math.isfinite(value)}
    of_policy = "entropy/visited_prefixes" if name == "beams" else "entropy/token"
    assert {of_policy, "ess/zero_advantage", "ess/zero_advantage_prompts"} <= logged
    assert ("delta_h/backward" in logged) == (name != "beams")

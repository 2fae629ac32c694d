"""Trainers of any size, to measure the cost of a step: random weights, random prompts, a meaningless reward.

The cost of a step depends only on shapes, so nothing is downloaded and nothing is learned.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, Qwen2Config, set_seed
from transformers import AutoModelForCausalLM as CausalLM
from transformers.trainer_callback import PrinterCallback

from rl_training import DrGRPOConfig, DrGRPOTrainer, Probe
from rl_training.models.load import TINY_PATH
from rl_training.step.residual import ResidualTest
from rl_training.tasks.arithmetic import arithmetic

RolloutFunc = Callable[[list[str], Any], dict[str, Any]]
# hidden size, intermediate size, layers, attention heads, key-value heads, vocabulary
SHAPES = {
    "small": (32, 64, 2, 4, 2, 128),
    "hidden256": (256, 768, 4, 4, 2, 4096),
    "hidden512": (512, 1536, 6, 8, 4, 4096),
    "qwen2_5_0_5b": (896, 4864, 24, 14, 2, 151936),
    "qwen2_5_1_5b": (1536, 8960, 28, 12, 2, 151936),
}


@dataclass(frozen=True)
class Workload:
    """The shapes of a step.

    Args:
        shape: "default_task" (the shipped model and its task), a name in SHAPES, or a transformers config.json.
        rank: Rank of a LoRA on all linear layers. 0 trains all parameters.
        prompts: Prompts per step, each with `responses` responses.
        folds: Microbatches per step.
        given: Use random tokens of full length as responses instead of sampling: a step without generation. Whether the
            policy drew them is then not tested.
        target_kl_share: Bounds each step. 0 does not bound it.
    """

    shape: str = "default_task"
    rank: int = 0
    prompts: int = 32
    responses: int = 8
    prompt_tokens: int = 16
    completion_tokens: int = 36
    folds: int = 8
    checkpointing: bool = False
    bf16: bool = False
    given: bool = False
    target_kl_share: float = 0.0


def model_config(shape: str) -> PretrainedConfig:
    """Return the config of a shape: the shipped model's, one from SHAPES, or one read from a config.json."""
    if shape == "default_task":
        return AutoConfig.from_pretrained(TINY_PATH)
    if shape not in SHAPES:
        return AutoConfig.from_pretrained(shape)
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        rope_theta=1e6,
    )


def make_trainer(
    workload: Workload, probes: Sequence[Probe], max_steps: int, config: PretrainedConfig | None = None
) -> DrGRPOTrainer:
    """Return a trainer for this workload, or for another model with the same workload if `config` is given."""
    set_seed(0)
    if workload.given:
        ResidualTest._reason = lambda self, step: None  # type: ignore[method-assign]
    per_step = workload.prompts * workload.responses
    if workload.prompts % workload.folds:
        raise ValueError(f"{workload.prompts} prompts cannot be divided evenly into {workload.folds} folds")
    is_task = workload.shape == "default_task" and config is None
    task = arithmetic() if is_task else None
    trainer = DrGRPOTrainer(
        CausalLM.from_pretrained(TINY_PATH) if task else random_model(config or model_config(workload.shape)),
        task.reward if task else meaningless_reward,
        DrGRPOConfig(
            tempfile.mkdtemp(),
            max_steps=max_steps,
            per_device_train_batch_size=per_step // workload.folds,
            gradient_accumulation_steps=workload.folds,
            num_generations=workload.responses,
            max_completion_length=workload.completion_tokens,
            learning_rate=3e-4 if is_task else 1e-6,
            adam_beta2=0.99,
            lr_scheduler_type="constant",
            gradient_checkpointing=workload.checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            bf16=workload.bf16,
            target_kl_share=workload.target_kl_share or None,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=task.train_dataset if task else random_prompts(workload.prompt_tokens),
        processing_class=AutoTokenizer.from_pretrained(TINY_PATH),
        peft_config=LoraConfig(r=workload.rank, target_modules="all-linear") if workload.rank else None,
        probes=probes,
        rollout_func=given_responses(workload) if workload.given else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model with random weights, created on the device it runs on: a billion draws take a CPU a minute."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_PATH)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return CausalLM.from_config(config, dtype=torch.float32)


def random_prompts(num_tokens: int) -> Dataset:
    """Return prompts of `num_tokens` digits; the tiny tokenizer maps each digit to one token."""
    rng = random.Random(0)
    return Dataset.from_dict({"prompt": ["".join(rng.choices("0123456789", k=num_tokens)) for _ in range(1024)]})


def given_responses(workload: Workload) -> RolloutFunc:
    """Return a `rollout_func` that TRL calls instead of generating. Responses are random digits and letters."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_PATH)
    rng = random.Random(0)

    def respond(prompts: list[str], trainer: Any) -> dict[str, Any]:
        responses = [rng.choices(range(7, 60), k=workload.completion_tokens) for _ in prompts]
        return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": responses, "logprobs": None}

    return respond


def meaningless_reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return a number for each response that usually differs between the responses to a prompt."""
    return [sum(ids) % 7 / 7.0 for ids in completion_ids]

"""Generates responses with a trainer's model and settings, one batch at a time, and says how large that may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from trl import GRPOTrainer

from rl_training.hosts.trl.sharding import has_sharded_weights
from rl_training.hosts.trl.versions import of_trainer, tokenizer_of, unwrap_for_generation
from rl_training.parallel.fsdp import reshard

KV_CACHE_MEMORY_SHARE = 1 / 8  # share of a GPU's memory for the KV cache of responses that a probe generates


def max_responses(trainer: GRPOTrainer, prompts: Sequence[Any], memory: float) -> int:
    """Return how many responses to these prompts may be generated at once in `memory` bytes. At least 1."""
    longest_prompt = max(map(len, trainer._tokenize_prompts(list(prompts))[0]))
    return max_kv_caches(trainer.model.config, longest_prompt + trainer.max_completion_length, memory)


def max_kv_caches(config: Any, tokens: int, memory: float) -> int:
    """Return how many fp32 KV caches of `tokens` tokens fit into their share of `memory` bytes. At least 1."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return max(1, int(KV_CACHE_MEMORY_SHARE * memory) // (2 * 4 * text.num_hidden_layers * heads * width * tokens))


def generate(trainer: GRPOTrainer, prompt_ids: list[Tensor]) -> list[Tensor]:
    """Generate a response to each prompt as TRL does, cut after the first end-of-sequence token."""
    pad = tokenizer_of(trainer).pad_token_id
    ends = of_trainer(trainer, "eos_token_ids")
    config = None if trainer.use_vllm else trainer.generation_config
    if config is None:  # vLLM's settings are neutral too: otherwise sampling_reason rules out fresh samples
        config = GenerationConfig(
            max_new_tokens=trainer.max_completion_length,
            do_sample=True,
            temperature=trainer.temperature,
            top_p=1.0,
            top_k=0,
            repetition_penalty=1.0,
            pad_token_id=pad,
            eos_token_id=ends,
            disable_compile=True,
        )
    ids = pad_sequence(prompt_ids, True, pad, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in prompt_ids], True, padding_side="left")
    checkpointing = trainer.args.gradient_checkpointing_kwargs
    with unwrap_for_generation(trainer.model_wrapped, trainer.accelerator, checkpointing) as model:
        # Sharded weights are gathered layer by layer, so all ranks must generate until the longest response ends.
        sequences = model.generate(
            input_ids=ids, attention_mask=mask, generation_config=config, synced_gpus=has_sharded_weights(trainer)
        )
    reshard(trainer.model)
    completions = sequences[:, ids.shape[1] :]
    is_end = torch.isin(completions, torch.tensor(ends, device=completions.device))
    lengths = (is_end.cumsum(dim=1) - is_end.long() == 0).sum(dim=1)  # tokens with no end before them
    return [row[:length] for row, length in zip(completions, lengths.tolist(), strict=True)]

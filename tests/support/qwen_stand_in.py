"""A small stand-in for Qwen2.5: its architecture with every option as published, and its own byte-level BPE tokenizer.

It was taught the form of an answer, so it guesses some right: without any reward no weight would move.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from configs import QUICK, composed
from tokenizers import ByteLevelBPETokenizer
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from rl_training.job.configuration.prepare import prepare_run
from rl_training.job.run.training import TrainingRun, build_run
from rl_training.tasks.gsm8k import gsm8k

EOS = "<|endoftext|>"

ROWS = [
    {"question": f"Mia has {a} {what} and finds {b} more. How many {what} has she?", "answer": f"so\n#### {a + b}"}
    for what in ("pens", "eggs", "coins")
    for a in range(1, 5)
    for b in range(1, 5)
]

SMALL = [
    *QUICK, "trainer.max_steps=2", "trainer.max_completion_length=16", "++trainer.save_strategy=no",
]  # fmt: skip


@functools.cache
def taught(temporary: Path) -> Path:
    """Return a folder with rows.jsonl, and under model/ the model in bf16 and its tokenizer."""
    folder = temporary / "qwen"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    prompts = gsm8k(str(folder / "rows.jsonl")).train_dataset["prompt"]
    tokenizer = trained_tokenizer([f"{prompt} 5 </think> <answer>5</answer>" for prompt in prompts])
    model = small_qwen(tokenizer)
    teach_the_form(model, tokenizer, prompts)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def trained_tokenizer(texts: list[str]) -> PreTrainedTokenizerBase:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=400, special_tokens=[EOS], show_progress=False)
    kept = json.loads(bpe.to_str())["model"]
    merges = [tuple(pair) for pair in kept["merges"]]
    return Qwen2Tokenizer(vocab=kept["vocab"], merges=merges, unk_token=EOS, eos_token=EOS, pad_token=EOS)


def small_qwen(tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            max_position_embeddings=131072,
            use_sliding_window=False,
            initializer_range=0.08,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    eos = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(bos_token_id=eos, eos_token_id=eos, do_sample=False, max_new_tokens=2048)
    return model


def teach_the_form(model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> None:
    """Train until a response is some digit in answer tags."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        chosen = torch.randint(len(prompts), (8,), generator=generator).tolist()
        digits = torch.randint(1, 10, (8,), generator=generator).tolist()
        texts = [f"{prompts[i]} {d} </think> <answer>{d}</answer>{EOS}" for i, d in zip(chosen, digits, strict=True)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        model(input_ids=batch.input_ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def experiment(folder: Path, run_dir: Path, *overrides: str) -> TrainingRun:
    data = (f"model.name={folder / 'model'}", f"data.path={folder / 'rows.jsonl'}")
    cfg = composed("train", "experiment=qwen_gsm8k", *data, f"run_dir={run_dir}", *SMALL, *overrides)
    return build_run(prepare_run(cfg))

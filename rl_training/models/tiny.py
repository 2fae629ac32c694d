"""The default model: a Qwen2 with about 105k parameters that solves about half of the arithmetic task.

`TINY_PATH` in load.py is its checkpoint in the package: no download, and a training step takes half a second on one CPU
core. The model was warmed up on worked examples in two styles, with and without the running result, and uses each about
half of the time; only answers in the first style are mostly right. This leaves something to learn for reinforcement
learning, and entropy to reduce.

`python -m rl_training.job.make_tiny` makes the checkpoint again. `--task NAME` makes the same model for a reasoning-gym
task instead, warmed up on answers alone. The same seed gives bitwise the same weights on the same kind of machine.
Checkpoints of other seeds start and end at different rewards, which is why one checkpoint is shipped.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from itertools import islice

import torch
from tokenizers import AddedToken
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    get_cosine_with_min_lr_schedule_with_warmup,
)

from rl_training.errors import UserError

_PAD = "<pad>"
_EOS = "<eos>"
_UNK = "<unk>"
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_MAX_LENGTH = 128  # in tokens; the longest exercise with its worked answer has 46
_IGNORED = -100  # label of tokens that the loss ignores


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer with 103 tokens: one per printable ASCII character, newline, four tags, pad, eos and unk.

    The tags are added tokens, but not special ones: TRL decodes with `skip_special_tokens=True` before it calls the
    reward, which must see the tags. All other characters are dropped: this kind of tokenizer never emits unk.
    """
    # AutoTokenizer loads the tokenizer of a Qwen2 model as a Qwen2Tokenizer and takes over only vocabulary and merges,
    # so this is one from the start: byte-level BPE without merges, where Ċ is newline and Ġ is space.
    characters = (*"ĊĠ", *string.digits, *string.ascii_letters, *string.punctuation)
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate((_PAD, _EOS, _UNK, *_TAGS, *characters))},
        merges=[],
        pad_token=_PAD,
        eos_token=_EOS,
        unk_token=_UNK,
        padding_side="left",
        model_max_length=_MAX_LENGTH,
    )
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in _TAGS])
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Make the untrained model, in fp32 on the CPU, without changing the caller's random state."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.08,  # with the usual 0.02 the warm start needs far more than 450 steps
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Iterator[tuple[str, str]],
    num_steps: int = 450,
) -> list[float]:
    """Train on worked examples, and return the loss of each step, in nats per completion token.

    It uses AdamW at 4e-3 with 32 examples per step, 20 steps of linear warm-up, then cosine decay to a tenth.

    Args:
        examples: Prompts with right completions, as a task's `worked_examples` yields them.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
    schedule = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, num_warmup_steps=20, num_training_steps=num_steps, min_lr_rate=0.1
    )
    losses: list[float] = []
    model.train()
    progress = tqdm(range(num_steps), desc="warm start", unit="step")
    for _ in progress:
        input_ids, labels = _collate(tokenizer, list(islice(examples, 32)))
        # No attention mask is needed: padding is on the right, which a causal model does not see.
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    model.eval()
    return losses


def _collate(tokenizer: PreTrainedTokenizerFast, examples: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Return token ids and labels, both (examples, tokens). The labels ignore prompt and padding."""
    rows = []
    labels = []
    for prompt, completion in examples:
        prompt_ids = tokenizer(prompt).input_ids
        completion_ids = tokenizer(completion + _EOS).input_ids
        if len(prompt_ids) + len(completion_ids) > (limit := tokenizer.model_max_length):
            raise UserError(f"{prompt!r} with its answer has over {limit} tokens: use another task")
        rows.append(torch.tensor(prompt_ids + completion_ids))
        labels.append(torch.tensor([_IGNORED] * len(prompt_ids) + completion_ids))
    return pad_sequence(rows, True, tokenizer.pad_token_id), pad_sequence(labels, True, _IGNORED)

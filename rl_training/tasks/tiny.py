"""The embedded default model: a Qwen2 of about 105k parameters that half knows the arithmetic task.

`TINY_PATH` is a checkpoint in the package: no download, a training step of half a second on one CPU core. It was warmed
up on worked examples in two styles, with and without the running result, and answers in each about half of the time;
only the first is mostly right. So there is something for reinforcement learning to find, and entropy for it to spend.

Remake the checkpoint with `python -m rl_training.tasks.tiny`; `--task NAME` makes the same model for a task of
reasoning-gym instead, warmed up on answers alone. The same seed gives bitwise the same weights on the same kind of
machine. Another seed's checkpoint starts and ends elsewhere, which is why one is shipped.
"""

import argparse
import json
import string
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

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
from rl_training.tasks.arithmetic import worked_examples
from rl_training.tasks.reasoning_gym import answered_examples
from rl_training.tasks.task import WorkedExample

TINY_PATH = Path(__file__).parent / "assets" / "tiny"

_PAD, _EOS, _UNK = "<pad>", "<eos>", "<unk>"
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_MAX_LENGTH = 128  # tokens; the longest exercise with its worked answer has 46
_IGNORED = -100  # the label that the loss leaves out


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer of 103 tokens: one per printable ASCII character, newline, four tags, pad, eos and unk.

    The tags are added tokens but not special ones: TRL decodes with `skip_special_tokens=True` before it asks the
    reward, which has to see them. Any other character is dropped: this kind of tokenizer never emits unk.
    """
    # AutoTokenizer makes a Qwen2Tokenizer of whatever stands beside a Qwen2 model, and takes over only the vocabulary
    # and the merges. So be one from the start: byte-level BPE without merges, where Ċ is newline and Ġ is space.
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
    """Make the untrained model in fp32 on the CPU; the caller's random state is left as it was."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.08,  # with the usual 0.02 the warm start is far from done after 450 steps
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Iterator[WorkedExample],
    num_steps: int = 450,
) -> list[float]:
    """Train on worked examples, and yield the loss of each step, in nats per completion token.

    AdamW at 4e-3, 32 examples a step, 20 steps of linear warm-up, then a cosine down to a tenth.
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
        # No attention mask: the padding is on the right, where a causal model does not look.
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    model.eval()
    return losses


def _collate(tokenizer: PreTrainedTokenizerFast, examples: list[WorkedExample]) -> tuple[Tensor, Tensor]:
    """Return token ids and labels, both (examples, tokens); the labels ignore the prompt and the padding."""
    rows, labels = [], []
    for example in examples:
        prompt = tokenizer(example.prompt).input_ids
        completion = tokenizer(example.completion + _EOS).input_ids
        if len(prompt) + len(completion) > (limit := tokenizer.model_max_length):
            raise UserError(f"{example.prompt!r} with its answer has over {limit} tokens: use another task")
        rows.append(torch.tensor(prompt + completion))
        labels.append(torch.tensor([_IGNORED] * len(prompt) + completion))
    return pad_sequence(rows, True, tokenizer.pad_token_id), pad_sequence(labels, True, _IGNORED)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rl_training.tasks.tiny",
        description="Make the tiny default model: build it, warm it up on worked arithmetic, or on the answers of a "
        "task of reasoning-gym (about 15 seconds on one core), and save it with its tokenizer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=TINY_PATH, metavar="DIR", help="folder to write")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and examples")
    parser.add_argument("--task", metavar="NAME", help="of reasoning-gym; none: arithmetic")
    parser.add_argument("--settings", type=json.loads, metavar="JSON", help='of that task: {"max_terms": 3}')
    arguments = parser.parse_args()
    if arguments.task and arguments.output == TINY_PATH:
        parser.error("--task needs --output FOLDER: the package's own model is that of arithmetic")

    torch.set_num_threads(1)  # sums over several threads have another order; and one is faster at this size
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, arguments.seed)
    examples = (
        answered_examples(arguments.task, arguments.seed, arguments.settings)
        if arguments.task
        else worked_examples(arguments.seed)
    )
    losses = warm_start(model, tokenizer, examples)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    print(f"{arguments.output}: {model.num_parameters()} parameters, last loss {losses[-1]:.3f} nats a token")


if __name__ == "__main__":
    main()

"""The settings of the four parts of step_size.py's plan, with their tasks and initial models."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from rl_training.models.load import TINY_PATH, load_causal_lm
from rl_training.models.tiny import build_tokenizer, warm_start
from rl_training.tasks.answers import only_answer
from rl_training.tasks.arithmetic import arithmetic, worked_examples
from rl_training.tasks.reasoning_gym import reasoning_gym
from rl_training.tasks.task import Task, WorkedExample

RESPONSES, HELD_OUT = 8, 128
RATES = (3e-5, 1.3e-4, 5.5e-4, 2.3e-3, 1e-2)
SGD_RATES = (0.01, 0.1, 1.0, 10.0, 100.0)
SOME = slice(0, None, 2)  # the first, third and last rate
LONG_CHAINS = 22, 26  # operands
FORM, FORM_TOKENS, FORM_STEPS = 48, 512, 80  # operands of a form, positions of its model, and steps of its warm-up


@dataclasses.dataclass(frozen=True)
class Setting:
    """One training: its task, its model, and how it is optimized.

    Args:
        task: Makes the task.
        tokens: Maximum length of a response.
        model: "tiny", "million", "long" (tiny, for sequences of 256 tokens), "form" (tiny, warmed up on forms), or a
            reasoning-gym task on which a tiny model is warmed up.
        prompts: Prompts per step.
        lora: Rank of the adapter. 0 trains all weights.
        iterations: Optimizer steps on each rollout.
        steps: Optimizer steps of a run.
        rates: Start rates.
        training: Further settings of the trainer.
        title: What a picture calls it. "" for its name.
    """

    task: Callable[[], Task]
    tokens: int
    model: str = "tiny"
    prompts: int = 16
    lora: int = 0
    optimizer: str = "adamw"
    iterations: int = 1
    steps: int = 30
    rates: tuple[float, ...] = RATES
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    title: str = ""


def chains(least: int, most: int) -> Callable[[], Task]:
    return lambda: arithmetic(2048, HELD_OUT, min_operands=least, max_operands=most)


GYM: dict[str, dict[str, int]] = {  # by reasoning-gym task, the settings of the warm-up
    "gcd": {"min_value": 1, "max_value": 60},
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
}


def gym(name: str, **settings: int) -> Callable[[], Task]:
    """Return a function that makes a reasoning-gym task, with the settings of its warm-up except those given."""
    return lambda: reasoning_gym(name, 1500, HELD_OUT, settings=GYM[name] | settings)


def form() -> Task:
    """Return a task whose prompt is a form to fill in. The reward is the share of right running results.

    The prompt `7+2=?-3=?<think>` asks for `7+2=9-3=6</think><answer>6</answer>`.
    """
    task = arithmetic(2048, HELD_OUT, min_operands=FORM, max_operands=FORM)
    train, held_out = (
        Dataset.from_dict({"prompt": [as_form(prompt) for prompt in rows["prompt"]], "answer": rows["answer"]})
        for rows in (task.train_dataset, task.eval_dataset)
    )
    return Task(train, held_out, share_of_results, only_answer, (0.0, 1.0))


def as_form(prompt: str) -> str:
    """Return `7+2=?-3=?<think>` for the prompt `7+2-3=?<think>`."""
    first, *steps = re.findall(r"[+-]?\d", prompt)
    return first + "".join(f"{step}=?" for step in steps) + "<think>"


def share_of_results(completions: list[str], prompts: list[str], **columns: Any) -> list[float]:
    """Return the share of a form's running results that a completion gives in their places.

    >>> share_of_results(["7+2=9-3=5</think>"], ["7+2=?-3=?<think>"])
    [0.5]
    """
    shares = []
    for text, prompt in zip(completions, prompts, strict=True):
        right = list(accumulate(map(int, re.findall(r"[+-]?\d", prompt))))[1:]
        given = [int(digit) for digit in re.findall(r"=(\d)", text)]
        shares.append(sum(map(int.__eq__, given, right)) / len(right))
    return shares


def worked_forms() -> Iterator[WorkedExample]:
    """Yield forms filled in, endlessly."""
    for example in worked_examples(0, FORM, FORM):
        if not example.completion.startswith("</think>"):
            yield WorkedExample(as_form(example.prompt), example.completion)


FIRST = {
    "few_prompts": Setting(chains(4, 6), 30, prompts=8),
    "lora": Setting(chains(6, 8), 38, lora=4),
    "gcd": Setting(gym("gcd"), 10, model="gcd", prompts=32),
    "reuse": Setting(chains(5, 7), 34, iterations=2),
    "muon": Setting(chains(4, 7), 34, optimizer="muon"),
    "sgd": Setting(chains(5, 7), 34, optimizer="sgd", rates=SGD_RATES),
    "million": Setting(chains(4, 6), 30, model="million", rates=RATES[SOME]),
}
SECOND = {
    "sgd_few_prompts": Setting(chains(3, 5), 26, prompts=8, optimizer="sgd", rates=SGD_RATES),
    "reuse_4": Setting(chains(4, 5), 26, iterations=4, steps=32),
    "spelling": Setting(gym("spell_backward", min_word_len=4, max_word_len=6), 12, model="spell_backward"),
    "muon_32": Setting(chains(3, 6), 30, prompts=32, optimizer="muon"),
    "sixty_steps": Setting(chains(5, 6), 30, prompts=8, steps=60),
    "lora_16": Setting(chains(5, 6), 30, prompts=32, lora=16),
    "long": Setting(chains(*LONG_CHAINS), 4 * LONG_CHAINS[1] + 6, model="long", prompts=8),
}
KL_TERM = {"beta": 0.04}
THIRD = {
    "beta2_999": Setting(chains(6, 7), 34, training={"adam_beta2": 0.999}, title="AdamW, β2 .999"),
    "beta2_95": Setting(chains(4, 8), 38, prompts=8, training={"adam_beta2": 0.95}, title="AdamW, β2 .95, 8 prompts"),
    "dapo_kl": Setting(chains(5, 8), 38, training={"loss_type": "dapo"} | KL_TERM, title="DAPO with a KL term"),
    "sgd_chains": Setting(chains(3, 8), 38, optimizer="sgd", rates=SGD_RATES, title="SGD"),
    "lora_8": Setting(chains(7, 8), 38, lora=8, title="LoRA, rank 8"),
    "muon_8": Setting(chains(3, 9), 42, prompts=8, optimizer="muon", title="Muon, 8 prompts"),
    "grpo_kl_4": Setting(
        chains(4, 9), 42, iterations=4, steps=32, title="GRPO, KL term, 4 steps a rollout",
        training={"loss_type": "grpo", "scale_rewards": "group"} | KL_TERM,
    ),
    "spelling_64": Setting(
        gym("spell_backward", min_word_len=3, max_word_len=6), 12, model="spell_backward", prompts=64,
        title="spelling, 64 prompts",
    ),
    "million_short": Setting(chains(3, 4), 20, model="million", prompts=8, title="0.94M parameters, 8 prompts"),
    "long_middle": Setting(chains(12, 14), 64, model="long", prompts=8, title="about 55 tokens, 8 prompts"),
}  # fmt: skip
FOURTH = {
    "form": Setting(form, 4 * FORM + 8, model="form", prompts=8, title="up to 195 tokens, 8 prompts"),
}
TUNING = {  # the default task, on which the share was chosen as well; not judged
    "default": Setting(chains(3, 7), 34),
    "default_reuse": Setting(chains(3, 7), 34, iterations=4, steps=32),
}
SETTINGS = FIRST | SECOND | THIRD | FOURTH | TUNING


@functools.cache
def task_of(make: Callable[[], Task]) -> Task:
    return make()


def model_folder(name: str, output: Path) -> Path:
    """Return the folder of a setting's initial model. Makes the model if it is missing."""
    folder = TINY_PATH if name == "tiny" else output / "models" / name
    if (folder / "config.json").is_file():
        return folder
    if name in GYM:
        asked = ["--task", name, "--settings", json.dumps(GYM[name]), "--output", str(folder)]
        subprocess.run([sys.executable, "-m", "rl_training.job.make_tiny", *asked], check=True)
        return folder
    model, tokenizer = {"million": million, "long": long, "form": form_model}[name]()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def million() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Make a model of .94M parameters, warmed up on the default task."""
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=160, intermediate_size=480, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
        initializer_range=0.05, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    warm_start(model, tokenizer, worked_examples(0), 250)
    return model, tokenizer


def long() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Make a tiny model for sequences of 256 tokens: the default one, warmed up further on long chains."""
    model, tokenizer = load_causal_lm(TINY_PATH)
    model.config.max_position_embeddings = tokenizer.model_max_length = 256
    torch.manual_seed(0)
    warm_start(model, tokenizer, worked_examples(0, LONG_CHAINS[0] - 6, LONG_CHAINS[1]), 300)
    return model, tokenizer


def form_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Make a tiny model for sequences of 512 tokens: the default one, warmed up further on forms."""
    model, tokenizer = load_causal_lm(TINY_PATH)
    model.config.max_position_embeddings = tokenizer.model_max_length = FORM_TOKENS
    torch.manual_seed(0)
    warm_start(model, tokenizer, worked_forms(), FORM_STEPS)
    return model, tokenizer

"""Responses to the rows of a task: chooses rows, forms batches, generates, scores and judges.

The batches do not depend on the number of processes: process r of R takes batches r, r + R, …, so R processes produce
exactly the same responses as one.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.evaluation.policy import CheckpointPolicy, uniforms_of
from rl_training.tasks.task import Task

GREEDY = -1  # number of the greedily decoded response


@dataclass(frozen=True)
class Response:
    """One response, scored and judged. The score arrays have one entry per token, in nats."""

    row: int  # index in the task's evaluation split
    number: int  # 0, 1, … among the sampled responses to this row; GREEDY for the greedy one
    text: str
    reward: float
    truncated: bool
    answer: str | None  # the answer that the task reads from the text; None if there is none
    logps: np.ndarray
    entropies: np.ndarray
    kl: np.ndarray | None

    @property
    def length(self) -> int:
        return len(self.logps)


def make_batches(
    rows: Sequence[int], responses_per_prompt: int, greedy: bool, batch_size: int
) -> list[list[tuple[int, int]]]:
    """Return each batch as (row, number) pairs. Greedy responses, one per row, have batches of their own."""
    sampled = [(row, number) for row in rows for number in range(responses_per_prompt)]
    parts = (sampled, [(row, GREEDY) for row in rows] if greedy else [])
    return [part[start : start + batch_size] for part in parts for start in range(0, len(part), batch_size)]


def choose_rows(num_rows: int, fraction: float, seed: int) -> tuple[int, ...]:
    """Return a seeded random subset of the rows, sorted, with at least one row."""
    chosen = np.random.default_rng([seed]).permutation(num_rows)[: max(1, round(fraction * num_rows))]
    return tuple(sorted(int(row) for row in chosen))


def generate_responses(
    policy: CheckpointPolicy,
    task: Task,
    batches: Sequence[Sequence[tuple[int, int]]],
    seed: int,
    seconds: dict[str, float],
) -> Iterator[list[Response]]:
    """Yield the responses of each batch, and add the time taken to generate, score and judge them to `seconds`."""
    for batch in batches:
        rows = [task.held_out[row] for row, _ in batch]
        prompts = [tokenize(policy, row["prompt"]) for row in rows]
        uniforms = None
        if batch[0][1] != GREEDY:
            uniforms = torch.stack([uniforms_of(seed, *pair, policy.max_completion_length) for pair in batch])
        start = time.perf_counter()
        completions = policy.generate(prompts, uniforms)
        generated = time.perf_counter()
        scores = policy.score(prompts, completions)
        scored = time.perf_counter()
        texts = [policy.tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
        rewards = judge(task, rows, texts, completions)
        eos_ids = torch.tensor(policy.eos_token_ids)
        responses = [
            Response(
                *pair,
                text,
                reward,
                truncated=not bool(torch.isin(ids[-1:], eos_ids).any()),
                answer=task.given_answer(text) if task.given_answer else None,
                logps=score.logps.numpy(),
                entropies=score.entropies.numpy(),
                kl=None if score.kl is None else score.kl.numpy(),
            )
            for pair, text, reward, ids, score in zip(batch, texts, rewards, completions, scores, strict=True)
        ]
        now = time.perf_counter()
        spent = {"generate": generated - start, "score": scored - generated, "judge": now - scored}
        seconds.update({name: seconds.get(name, 0.0) + value for name, value in spent.items()})
        yield responses


def tokenize(policy: CheckpointPolicy, prompt: Any) -> Tensor:
    """Return the tokens of a prompt: plain text, or messages formatted by the tokenizer's chat template.

    Raises:
        UserError: The tokenizer cannot encode the prompt: it has an unknown token, or decoding it loses characters.
    """
    tokenizer = policy.tokenizer
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **policy.template)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    unknown = tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids
    if unknown or not _letters(prompt) <= _letters(tokenizer.decode(ids)):
        raise UserError(
            f"the tokenizer of this run cannot encode the prompt {prompt[:80]!r}: it was made for another task; leave "
            "out data=… or eval_dataset=… to evaluate the run's own"
        )
    return torch.tensor(ids)


def judge(task: Task, rows: Sequence[dict[str, Any]], texts: list[str], token_ids: Sequence[Tensor]) -> list[float]:
    """Return the task's reward of each response.

    Raises:
        UserError: A reward is missing, not finite, or outside the task's range.
    """
    prompts = [row["prompt"] for row in rows]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    completions: list[Any] = list(texts)
    if not isinstance(prompts[0], str):
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    completion_ids = [ids.tolist() for ids in token_ids]
    rewards = list(task.reward(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns))
    if len(rewards) != len(texts):
        raise UserError(f"the task's reward function returned {len(rewards)} rewards for {len(texts)} responses")
    least, most = task.reward_range or (-np.inf, np.inf)
    for text, reward in zip(texts, rewards, strict=True):
        if reward is None or not np.isfinite(reward) or not least <= reward <= most:
            bounds = f" between {least:g} and {most:g}, as its Task says" if task.reward_range else ""
            raise UserError(
                f"the task's reward is {reward} for the response {text[:80]!r}: it must be a finite number{bounds}"
            )
    return [float(reward) for reward in rewards]


def _letters(text: str) -> set[str]:
    """Return the characters of a text without spaces and case, NFKD-decomposed: tokenizers may normalize these."""
    return set("".join(unicodedata.normalize("NFKD", text).casefold().split()))

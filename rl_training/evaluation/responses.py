"""Responses to the rows of a task: chooses rows, forms batches, generates, scores and rewards.

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

OTHER_TASK = "leave out data=… or eval_dataset=… to evaluate the run's own"


@dataclass(frozen=True)
class Batch:
    """Responses that are generated at once: all sampled, or all greedy."""

    places: tuple[tuple[int, int], ...]  # of each response: the row of the evaluation split, and its number
    is_greedy: bool

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True)
class Response:
    """One response, scored and judged. The score arrays have one entry per token, in nats."""

    row: int  # index in the task's evaluation split
    number: int  # 0, 1, … among the sampled responses to this row; 0 for the greedy one
    text: str
    reward: float
    truncated: bool
    answer: str | None  # the answer that the task reads from the text; None if there is none
    logps: np.ndarray
    entropies: np.ndarray
    kl: np.ndarray | None
    is_greedy: bool = False

    @property
    def length(self) -> int:
        return len(self.logps)


def make_batches(rows: Sequence[int], responses_per_prompt: int, greedy: bool, batch_size: int) -> list[Batch]:
    """Return the batches of sampled responses, then those of greedy ones, one per row."""
    places = tuple((row, number) for row in rows for number in range(responses_per_prompt))
    sampled = [Batch(part, is_greedy=False) for part in _split(places, batch_size)]
    if not greedy:
        return sampled
    return sampled + [Batch(part, is_greedy=True) for part in _split(tuple((row, 0) for row in rows), batch_size)]


def _split(places: tuple[tuple[int, int], ...], size: int) -> Iterator[tuple[tuple[int, int], ...]]:
    return (places[start : start + size] for start in range(0, len(places), size))


def choose_rows(num_rows: int, fraction: float, seed: int) -> tuple[int, ...]:
    """Return a seeded random subset of the rows, sorted, with at least one row."""
    chosen = np.random.default_rng([seed]).permutation(num_rows)[: max(1, round(fraction * num_rows))]
    return tuple(sorted(int(row) for row in chosen))


def generate_responses(
    policy: CheckpointPolicy, task: Task, batches: Sequence[Batch], seed: int
) -> Iterator[tuple[list[Response], dict[str, float]]]:
    """Yield the responses of each batch, and the seconds that it took to generate, score and judge them."""
    for batch in batches:
        rows = [task.held_out[row] for row, _ in batch.places]
        prompts = [tokenize(policy, row["prompt"]) for row in rows]
        uniforms = None
        if not batch.is_greedy:
            uniforms = torch.stack([uniforms_of(seed, *place, policy.max_completion_length) for place in batch.places])
        start = time.perf_counter()
        completions = policy.generate(prompts, uniforms)
        generated = time.perf_counter()
        scores = policy.score(prompts, completions)
        scored = time.perf_counter()
        texts = [policy.tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
        rewards = reward_responses(task, rows, texts, completions)
        eos_ids = torch.tensor(policy.eos_token_ids)
        responses = [
            Response(
                *place,
                text,
                reward,
                truncated=not bool(torch.isin(ids[-1:], eos_ids).any()),
                answer=task.given_answer(text) if task.given_answer else None,
                logps=score.logps.numpy(),
                entropies=score.entropies.numpy(),
                kl=None if score.kl is None else score.kl.numpy(),
                is_greedy=batch.is_greedy,
            )
            for place, text, reward, ids, score in zip(batch.places, texts, rewards, completions, scores, strict=True)
        ]
        judged = time.perf_counter()
        yield responses, {"generate": generated - start, "score": scored - generated, "judge": judged - scored}


def tokenize(policy: CheckpointPolicy, prompt: Any) -> Tensor:
    """Return the tokens of a prompt: plain text, or messages formatted by the tokenizer's chat template.

    Raises:
        UserError: The tokenizer cannot encode the prompt: it has an unknown token, decoding it loses characters, or it
            is of messages and there is no chat template.
    """
    tokenizer = policy.tokenizer
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif not (tokenizer.chat_template or policy.template.get("chat_template")):
        raise UserError(
            f"this task's prompts are messages, and the tokenizer of this run has no chat template: {OTHER_TASK}"
        )
    else:
        prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **policy.template)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    unknown = tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids
    if unknown or not _letters(prompt) <= _letters(tokenizer.decode(ids)):
        raise UserError(
            f"the tokenizer of this run cannot encode the prompt {prompt[:80]!r}: it was made for another task; "
            f"{OTHER_TASK}"
        )
    return torch.tensor(ids)


def reward_responses(
    task: Task, rows: Sequence[dict[str, Any]], texts: list[str], token_ids: Sequence[Tensor]
) -> list[float]:
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

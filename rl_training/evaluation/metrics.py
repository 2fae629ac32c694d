"""Metrics of scored responses with standard errors over prompts: the built-in ones and the user's own.

    reward                      mean reward of sampled responses
    greedy_accuracy             share of prompts whose greedy response is right
    pass_at_1 … pass_at_k       probability that at least one of k responses is right
    majority                    probability that the most frequent answer is right, ties broken at random
    entropy/token, /sequence    exact next-token entropy: total nats over total tokens; mean nats per response
    kl/token, /sequence         the same for the KL divergence from the policy to the run's first model
    length                      tokens per response
    truncated                   share of responses that reach the length limit
    format                      share of responses from which an answer can be read

A response is right if it earns at least `right_reward`. Confidence intervals of shares stay within 0 and 1, those of
rewards within the task's reward range, if it declares one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.evaluation.pass_at_k import majority_vote, pass_at_k
from rl_training.evaluation.prompt_means import mean_over_prompts, ratio_over_prompts, share_over_prompts
from rl_training.evaluation.responses import Response
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.unavailable import Unavailable

Metric = Callable[..., Mapping[str, float]]
ByRow = Mapping[int, Sequence[Response]]

NO_ANSWER = Unavailable("no_given_answer", "the task does not define how to read an answer (Task.given_answer)")
NO_GREEDY = Unavailable("no_greedy", "greedy decoding is off (the option greedy)")
NO_REFERENCE = Unavailable(
    "no_reference", "no first model to compare with (the option kl is off, or the run is unknown)"
)


def response_metrics(
    responses: Sequence[Response],
    max_k: int,
    right_reward: float,
    can_read_answers: bool,
    reward_range: tuple[float, float] | None = None,
) -> dict[str, Estimate]:
    """Return the built-in metrics of a checkpoint's responses. Every row must have the same number of responses.

    Args:
        max_k: Largest k of pass@k, at most the number of responses per prompt.
        can_read_answers: Whether the task can read an answer from a response. If not, majority and format are nan.
        reward_range: Lowest and highest reward that a response can earn. None if unknown.

    Raises:
        UserError: `max_k` exceeds the number of responses per prompt.
    """
    sampled, greedy = group_by_row(responses)
    rewards = _value_table(sampled, lambda r: r.reward)
    is_right = rewards >= right_reward
    lengths = _value_table(sampled, lambda r: r.length)
    num_right = is_right.sum(dim=1)
    num_responses = rewards.shape[1]
    mean_rewards = rewards.mean(dim=1)
    metrics = {
        "reward": share_over_prompts(mean_rewards, *reward_range) if reward_range else mean_over_prompts(mean_rewards),
        "greedy_accuracy": Estimate.missing(NO_GREEDY),
    }
    if greedy:
        metrics["greedy_accuracy"] = share_over_prompts(
            torch.tensor([float(r.reward >= right_reward) for r in greedy.values()])
        )
    for k in range(1, max_k + 1):
        metrics[f"pass_at_{k}"] = share_over_prompts(pass_at_k(num_right, num_responses, k))
    metrics["majority"] = Estimate.missing(NO_ANSWER)
    has_answer = Estimate.missing(NO_ANSWER)
    if can_read_answers:
        votes = [
            majority_vote([r.answer for r in group], right.tolist())
            for group, right in zip(sampled.values(), is_right, strict=True)
        ]
        metrics["majority"] = share_over_prompts(torch.tensor(votes, dtype=torch.float64))
        has_answer = share_over_prompts(_value_table(sampled, lambda r: float(r.answer is not None)).mean(dim=1))
    metrics |= _per_token_and_sequence("entropy", _value_table(sampled, lambda r: r.entropies.sum()), lengths)
    if next(iter(sampled.values()))[0].kl is None:
        metrics |= {f"kl/{denominator}": Estimate.missing(NO_REFERENCE) for denominator in ("token", "sequence")}
    else:
        metrics |= _per_token_and_sequence("kl", _value_table(sampled, lambda r: r.kl.sum()), lengths)  # type: ignore[union-attr]
    return metrics | {
        "length": mean_over_prompts(lengths.mean(dim=1)),
        "truncated": share_over_prompts(_value_table(sampled, lambda r: float(r.truncated)).mean(dim=1)),
        "format": has_answer,
    }


def group_by_row(responses: Sequence[Response]) -> tuple[dict[int, list[Response]], dict[int, Response]]:
    """Group the responses by row: the sampled ones, ordered by row and number, and each row's greedy one."""
    ordered = sorted(responses, key=lambda r: (r.row, r.number))
    sampled: dict[int, list[Response]] = {}
    for response in ordered:
        if not response.is_greedy:
            sampled.setdefault(response.row, []).append(response)
    return sampled, {r.row: r for r in ordered if r.is_greedy}


def custom_metrics(name: str, metric: Metric, sampled: ByRow, dataset: Any) -> dict[str, Estimate]:
    """Return `name/KEY` for every KEY that a user's metric returns, averaged over the prompts that have a value.

    The metric is called once per prompt, with keyword arguments: the task's row and, for each sampled response, its
    text, its reward, and per-token arrays in nats. A prompt has no value where the metric returns nan or omits the key.

    Raises:
        UserError: The metric raised, or did not return a mapping from names to numbers. Names the metric and the row.
    """
    by_prompt: list[dict[str, float]] = []
    for index, group in sampled.items():
        row = dataset[index]
        try:
            returned = metric(
                row=row,
                responses=[r.text for r in group],
                rewards=[r.reward for r in group],
                logps=[r.logps for r in group],
                entropies=[r.entropies for r in group],
            )
            if not isinstance(returned, Mapping):
                raise TypeError(f"it returned {returned!r:.60} instead of numbers by name, such as {{'mine': 0.5}}")
            by_prompt.append({str(key): float(value) for key, value in returned.items()})
        except Exception as error:  # the user's code can raise anything
            raise UserError(
                f"metric {name} raised at row {index} (prompt {str(row['prompt'])[:60]!r}): "
                f"{type(error).__name__}: {error}"
            ) from error
    keys = dict.fromkeys(key for numbers in by_prompt for key in numbers)
    columns = {key: [numbers.get(key, math.nan) for numbers in by_prompt] for key in keys}
    return {f"{name}/{key}": mean_over_prompts(torch.tensor(columns[key], dtype=torch.float64)) for key in keys}


def _per_token_and_sequence(name: str, sums: Tensor, lengths: Tensor) -> dict[str, Estimate]:
    return {
        f"{name}/token": ratio_over_prompts(sums.sum(dim=1), lengths.sum(dim=1)),
        f"{name}/sequence": mean_over_prompts(sums.mean(dim=1)),
    }


def _value_table(sampled: ByRow, value: Callable[[Response], float]) -> Tensor:
    """Return `value` of every response, (prompts, responses per prompt), fp64."""
    return torch.from_numpy(np.array([[value(r) for r in group] for group in sampled.values()], dtype=np.float64))

"""Policies given as a table of logits by prefix, over responses that can be enumerated: their scores and draws."""

from __future__ import annotations

import math
import random

import reference
import torch
from torch import Tensor

from rl_training.policy.scores import Scores

Table = list[list[float]]
Response = tuple[int, ...]
EIGHTHS = [[6, 1, 1], [1, 3, 4], [2, 4, 2], [1, 1, 6], [5, 2, 1], [3, 3, 2], [1, 5, 2]]  # 8 · probabilities of 3 tokens
OLD = [[math.log(e / 8) for e in row] for row in EIGHTHS]
DIRECTION = [[random.Random(7 + 3 * r + c).gauss(0, 1) for c in range(3)] for r in range(7)]


def moved(table: Table, size: float) -> Table:
    return [
        [x + size * d for x, d in zip(row, along, strict=True)] for row, along in zip(table, DIRECTION, strict=True)
    ]


def draws(count: int, seed: int) -> list[Response]:
    chances = [math.exp(reference.sequence_logp(OLD, response)) for response in reference.RESPONSES]
    return random.Random(seed).choices(reference.RESPONSES, chances, k=count)


def ragged_scores(table: Table, responses: list[Response]) -> tuple[list[list[float]], list[list[float]]]:
    """Return log-probabilities and entropies of each token of each response."""
    logps, entropies = [], []
    for response in responses:
        rows = [reference.log_softmax(table[number]) for number in reference.prefix_numbers(response)]
        logps.append([row[token] for row, token in zip(rows, response, strict=True)])
        entropies.append([-sum(math.exp(x) * x for x in row) for row in rows])
    return logps, entropies


def as_scores(table: Table, responses: list[Response]) -> Scores:
    """Return the scores as padded tensors, with nan in the padding."""
    lengths = torch.tensor([len(response) for response in responses])
    mask = torch.arange(reference.MAX_LENGTH) < lengths.unsqueeze(1)

    def padded(rows: list[list[float]]) -> Tensor:
        full = [[*row, *[math.nan] * (reference.MAX_LENGTH - len(row))] for row in rows]
        return torch.tensor(full, dtype=torch.float64)

    return Scores(*(padded(rows) for rows in ragged_scores(table, responses)), mask=mask)

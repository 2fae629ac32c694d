"""How checkpoints are evaluated, as in `evaluation` of conf/evaluate.yaml. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of an evaluation. Their defaults are in conf/evaluate.yaml, and whoever reads them checks them."""

    fraction: float  # of the rows to evaluate: a seeded subset, the same for all checkpoints
    responses_per_prompt: int  # number of sampled responses to each prompt
    greedy: bool  # add one greedily decoded response to each prompt
    right_reward: float  # a response with at least this reward is right
    kl: bool  # measure the KL to the first model
    seed: int  # of the responses and of the subset of rows
    batch_size: int  # sequences generated at once
    gzip: bool  # compress the responses
    overwrite: bool  # replace an earlier evaluation of this name
    k: int | None = None  # largest k of pass@k; None for the number of responses
    temperature: float = 1.0  # of sampling
    max_completion_length: int = 256  # most tokens per response

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EvaluationOptions:
        """Return the options among these values by name, which have been checked. None stands for the default here."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: values[name] for name in names if values.get(name) is not None})

    @property
    def max_k(self) -> int:
        return self.responses_per_prompt if self.k is None else self.k
